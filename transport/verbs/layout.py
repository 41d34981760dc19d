"""Owns the C layouts of libibverbs that compiled code reads and writes: an ABI that every application inlines.

Checked against the library at start-up by `provider`, as far as running objects show it.
"""

from __future__ import annotations

from typing import Final

# struct ibv_send_wr (128 bytes on 64-bit machines).
WR_ID: Final = 0
WR_NEXT: Final = 8
WR_SG_LIST: Final = 16
WR_NUM_SGE: Final = 24  # int
WR_OPCODE: Final = 28  # int
WR_SEND_FLAGS: Final = 32  # unsigned
WR_IMM: Final = 36  # be32: raw here, both ends are of one byte order
WR_REMOTE_ADDR: Final = 40
WR_RKEY: Final = 48
SEND_WR_NBYTES: Final = 128

# struct ibv_recv_wr begins like a send's, and ends after num_sge.
RECV_WR_NBYTES: Final = 32

# struct ibv_sge.
SGE_ADDR: Final = 0
SGE_LENGTH: Final = 8  # u32
SGE_LKEY: Final = 12  # u32
SGE_NBYTES: Final = 16

# struct ibv_wc.
WC_ID: Final = 0
WC_STATUS: Final = 8  # int
WC_OPCODE: Final = 12  # int
WC_VENDOR_ERR: Final = 16  # u32
WC_BYTE_LEN: Final = 20  # u32
WC_IMM: Final = 24  # be32
WC_QP_NUM: Final = 28
WC_NBYTES: Final = 48

# struct ibv_qp and ibv_cq, as far as applications see them.
QP_CONTEXT: Final = 0
QP_PD: Final = 16
QP_SEND_CQ: Final = 24
QP_RECV_CQ: Final = 32
QP_HANDLE: Final = 48
QP_NUM: Final = 52
QP_TYPE: Final = 60
CQ_CONTEXT: Final = 0

# struct ibv_context: the device, then the table of functions that a provider fills in.
CONTEXT_POLL_CQ: Final = 96
CONTEXT_POST_SEND: Final = 208
CONTEXT_POST_RECV: Final = 216

OPCODE_WRITE: Final = 0
OPCODE_WRITE_WITH_IMM: Final = 1
SEND_SIGNALED: Final = 2
SEND_INLINE: Final = 8

STATUS_SUCCESS: Final = 0
STATUS_FLUSHED: Final = 5
STATUS_RETRY_EXCEEDED: Final = 12
STATUS_RNR_RETRY_EXCEEDED: Final = 13
STATUSES: Final[dict[int, str]] = {
    1: "local length error",
    2: "local queue pair operation error: bad local key or address, or the port is down",
    4: "local protection error",
    5: "flushed after an error of this connection, perhaps one that only the other end saw: do both use one MTU?",
    6: "memory window bind error",
    7: "bad response",
    8: "local access error",
    9: "the remote end found the request invalid: do both ends use one MTU?",
    10: "remote access error: the peer's memory is no longer registered, or the address is outside of it",
    11: "remote operation error",
    12: "no answer from the peer after all retries: it died, or the network lost it",
    13: "the peer had no receive posted after all retries",
    21: "fatal error of the card",
    22: "response time-out",
    23: "general error",
}
"""`enum ibv_wc_status` in words."""
QP_TYPE_RC: Final = 2
