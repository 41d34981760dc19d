"""Owns what travels between two ranks over a queue pair, and the words of a link's record.

Every message is an RDMA write with an immediate, and takes one of the receives that the peer keeps posted. Message m
also owns *slot* m mod DEPTH of the peer's frame memory, whether it uses it or not: a receive that was given back is a
free slot. Messages of a link arrive in order. Their kinds:

- FRAME: a header and up to `payload` bytes in the slot. The receiver copies them to where they belong. The first
  message of a call is a frame, because a frame carries the call's signature and an immediate has no room for it.
- SIGNAL: raises arrivals; nothing but the immediate travels.
- WRITE: bytes went straight into the peer's registered memory, which it has announced for this call.
- CREDIT: so many receives were posted again.

Messages of a later call wait, unopened, until that call begins here; the receives that they took are not given back
before, which holds a rank that runs ahead.
"""

from __future__ import annotations

from typing import Final

from gfkernels.transport import framed as c
from gfkernels.types import N_BUFFERS, N_CHANNELS

VERSION: Final = 1
"""Of frames and handshake; both ends must have the same."""

DEPTH: Final = 64
"""Receives that each end keeps posted, and slots of frame memory."""
RESERVE: Final = 4
"""Messages that only CREDITs may use, so that two full links cannot block one another."""
RETURN_EVERY: Final = DEPTH // 4
"""Receives that are given back with one CREDIT."""
REPOST_EVERY: Final = 8
"""Receives that are posted with one call."""
SEND_DEPTH: Final = DEPTH
"""Work requests outstanding in a link's send queue at most. As each message is one, the request that read a slot of the
own frame memory is completed before that slot's turn comes again."""
SIGNAL_EVERY: Final = 16
"""At least every so-manieth work request asks for a completion."""
BATCH: Final = 16
"""Work requests that are posted with one call."""
POLL_BATCH: Final = 16
"""Completions that are taken with one call."""

# The immediate: 2 bits of kind, 6 of channel (lane and role), 24 of call number, which wraps; of a CREDIT, a count.
IMM_FRAME: Final = 0
IMM_SIGNAL: Final = 1
IMM_WRITE: Final = 2
IMM_CREDIT: Final = 3
IMM_KIND_MASK: Final = 3
IMM_CHANNEL_SHIFT: Final = 2
IMM_CHANNEL_MASK: Final = 63
IMM_CALL_SHIFT: Final = 8
CALL_PERIOD: Final = 1 << 24
assert N_CHANNELS <= IMM_CHANNEL_MASK  # the last one says: no channel

MAGIC_WORD: Final = 0x3130535642564B47  # b"GKVBVS01"

KIND_DATA: Final = 0
KIND_MORE: Final = 1
"""Data that is not the last of its put: raises no arrivals yet."""
KIND_ANNOUNCE: Final = 2
"""The payload is the receiver's registered buffers: N_BUFFERS rows of (address, nbytes, rkey)."""
KIND_GOODBYE: Final = 3
"""The sender leaves after call `sequence`, having sent all it owed."""
KIND_PROBE: Final = 4
"""Sent once by each end before the link is used."""
KIND_WANT: Final = 5
"""The sender is about to write `nbytes` straight into a buffer, and waits for the announcement that says where it is.
The first message of a call where that is a WRITE: it carries the signature, and shows a span that does not fit."""
ANNOUNCE_NBYTES: Final = 24 * N_BUFFERS

# Byte offsets in a link's record (int64 words), behind those of `framed`.
INDEX: Final = c.OWN_WORDS + 0  # of the link in its rank; in the work requests' ids
QP: Final = c.OWN_WORDS + 8
CQ: Final = c.OWN_WORDS + 16
POST_SEND: Final = c.OWN_WORDS + 24
POST_RECV: Final = c.OWN_WORDS + 32
POLL_CQ: Final = c.OWN_WORDS + 40
LINKS: Final = c.OWN_WORDS + 48  # address of a row of link addresses, by INDEX
WCS: Final = c.OWN_WORDS + 56  # POLL_BATCH completions
REGIONS: Final = c.OWN_WORDS + 64  # address of (count, rows of (start, end, lkey, rkey))
BAD_WR: Final = c.OWN_WORDS + 72  # where the provider says which work request failed
FAR: Final = c.OWN_WORDS + 80  # address of N_BUFFERS rows (address, nbytes, rkey) that the peer announced
FAR_CALL: Final = c.OWN_WORDS + 88  # for which call it did
FRAMED_CALL: Final = c.OWN_WORDS + 96  # the last call for which a frame went out
VERIFIED_CALL: Final = c.OWN_WORDS + 104  # the last call whose signature came and was ours
ANNOUNCE_DUE: Final = c.OWN_WORDS + 112  # 1: the announcement found no room yet
OWN_ROWS: Final = c.OWN_WORDS + 120  # address of the announcement: N_BUFFERS rows (address, nbytes, rkey or -1)
FAULT_VENDOR: Final = c.OWN_WORDS + 128
PROBED: Final = c.OWN_WORDS + 136  # 1: the peer's probe came

# Sending. Messages, work requests and receives are counted from the start of time.
SENT: Final = c.OWN_WORDS + 144  # messages
GRANTED: Final = c.OWN_WORDS + 152  # messages that the peer has room for
POSTED: Final = c.OWN_WORDS + 160  # work requests
DONE: Final = c.OWN_WORDS + 168  # work requests known to be completed
SIGNALLED: Final = c.OWN_WORDS + 176  # the last work request that asked for a completion, plus one
PENDING: Final = c.OWN_WORDS + 184  # work requests built and not posted yet
BATCH_AT: Final = c.OWN_WORDS + 192  # BATCH slots of (work request, scatter element)
FRAMES_AT: Final = c.OWN_WORDS + 200  # own frame memory to send from: DEPTH slots
FRAMES_LKEY: Final = c.OWN_WORDS + 208
FAR_FRAMES: Final = c.OWN_WORDS + 216  # the peer's frame memory to write to: DEPTH slots
FAR_FRAMES_RKEY: Final = c.OWN_WORDS + 224
SLOT_NBYTES: Final = c.OWN_WORDS + 232
PAYLOAD_NBYTES: Final = c.OWN_WORDS + 240  # of a frame: SLOT_NBYTES less the header
INLINE_NBYTES: Final = c.OWN_WORDS + 248  # what the queue pair copies into the work request
MOST_NBYTES: Final = c.OWN_WORDS + 256  # of one RDMA write

# Receiving.
ARRIVED: Final = c.OWN_WORDS + 264  # messages
OPENED: Final = c.OWN_WORDS + 272  # messages
UNPOSTED: Final = c.OWN_WORDS + 280  # opened messages whose receive is not posted again yet
OWED: Final = c.OWN_WORDS + 288  # receives posted again that the peer does not know of
SLOTS_AT: Final = c.OWN_WORDS + 296  # frame memory that the peer writes to
QUEUE: Final = c.OWN_WORDS + 304  # DEPTH immediates, by message
RECVS_AT: Final = c.OWN_WORDS + 312  # REPOST_EVERY receive work requests, linked

# One put with payload may be under way on each channel, the last row is for channel -1.
PUTS: Final = c.OWN_WORDS + 320
P_PHASE: Final = 0
P_SRC: Final = 8
P_BUFFER: Final = 16
P_OFFSET: Final = 24
P_NBYTES: Final = 32
P_MOVED: Final = 40  # bytes handed over so far
P_LAST: Final = 48  # the work request after whose completion the source is free
P_LKEY: Final = 56
PUT_NBYTES: Final = 64
PHASE_NONE: Final = 0
PHASE_WRITE: Final = 1
PHASE_FRAMES: Final = 2

RECORD_NBYTES: Final = -(-(PUTS + PUT_NBYTES * (N_CHANNELS + 1)) // 64) * 64

# Ids of work requests: the link's index, whether it is a receive, and the number of the work request.
ID_LINK_SHIFT: Final = 48
ID_RECV: Final = 1 << 47
ID_NUMBER_MASK: Final = ID_RECV - 1

# A peer's row in the table points to (number of links, their addresses).
ROW_N_LINKS: Final = 0
ROW_LINKS: Final = 8
MAX_RAILS: Final = 8
ROW_NBYTES: Final = ROW_LINKS + 8 * MAX_RAILS

# Why a link failed (FAULT_REASON), beyond what `framed` knows.
REASON_STATUS: Final = c.OWN_REASONS
REASON_POST: Final = c.OWN_REASONS + 1
REASON_POLL: Final = c.OWN_REASONS + 2
REASON_UNSIGNED: Final = c.OWN_REASONS + 3
REASON_FAR_BOUNDS: Final = c.OWN_REASONS + 4
REASON_OVERRUN: Final = c.OWN_REASONS + 5

REASONS: Final[dict[int, str]] = {
    **c.REASONS,
    REASON_STATUS: "a work request ended with status {got}: {status} (vendor code {vendor:#x})",
    REASON_POST: "posting a work request failed with {got}",
    REASON_POLL: "polling for completions failed with {got}",
    REASON_UNSIGNED: "sent a message of call {got} before that call's signature",
    REASON_FAR_BOUNDS: "has announced a buffer of {expected} bytes, and this rank was to write up to byte {got}",
    REASON_OVERRUN: "sent more messages than receives were posted for it: {got} of {expected}",
}
