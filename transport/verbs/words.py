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

# Byte offsets in a frame's header (int64 words).
F_MAGIC: Final = 0
F_KIND: Final = 8
F_SEQUENCE: Final = 16
F_SIGNATURE: Final = 24
F_CHANNEL: Final = 32
F_BUFFER: Final = 40
F_OFFSET: Final = 48
F_NBYTES: Final = 56
HEADER_NBYTES: Final = 64
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

# Byte offsets in a link's record (int64 words).
PEER: Final = 0
INDEX: Final = 8  # of the link in its rank; in the work requests' ids
QP: Final = 16
CQ: Final = 24
POST_SEND: Final = 32
POST_RECV: Final = 40
POLL_CQ: Final = 48
LINKS: Final = 56  # address of a row of link addresses, by INDEX
WCS: Final = 64  # POLL_BATCH completions
REGIONS: Final = 72  # address of (count, rows of (start, end, lkey, rkey))
BAD_WR: Final = 80  # where the provider says which work request failed

CALL: Final = 88
CALL_SIGNATURE: Final = 96
LANDING: Final = 104  # 1 between BEGIN and FLUSH
BUFFERS: Final = 112  # address of N_BUFFERS rows (address, nbytes), copied at BEGIN
FAR: Final = 120  # address of N_BUFFERS rows (address, nbytes, rkey) that the peer announced
FAR_CALL: Final = 128  # for which call it did
FRAMED_CALL: Final = 136  # the last call for which a frame went out
VERIFIED_CALL: Final = 144  # the last call whose signature came and was ours
ANNOUNCE_DUE: Final = 152  # 1: the announcement found no room yet
OWN_ROWS: Final = 160  # address of the announcement: N_BUFFERS rows (address, nbytes, rkey or -1)
SIGNATURES: Final = 168  # address of N_SIGNATURES rows (sequence, signature)
N_SIGNATURES: Final = 16

FAULT: Final = 176  # a Fault, 0 while all is well; never reset
FAULT_REASON: Final = 184
FAULT_EXPECTED: Final = 192
FAULT_GOT: Final = 200
FAULT_CALL: Final = 208
FAULT_VENDOR: Final = 216
LEFT: Final = 224  # 1: the peer said goodbye
LEFT_CALL: Final = 232
PROBED: Final = 240  # 1: the peer's probe came
MOVED: Final = 248  # things that happened since PROGRESS last reported

# Sending. Messages, work requests and receives are counted from the start of time.
SENT: Final = 256  # messages
GRANTED: Final = 264  # messages that the peer has room for
POSTED: Final = 272  # work requests
DONE: Final = 280  # work requests known to be completed
SIGNALLED: Final = 288  # the last work request that asked for a completion, plus one
PENDING: Final = 296  # work requests built and not posted yet
BATCH_AT: Final = 304  # BATCH slots of (work request, scatter element)
FRAMES_AT: Final = 312  # own frame memory to send from: DEPTH slots
FRAMES_LKEY: Final = 320
FAR_FRAMES: Final = 328  # the peer's frame memory to write to: DEPTH slots
FAR_FRAMES_RKEY: Final = 336
SLOT_NBYTES: Final = 344
PAYLOAD_NBYTES: Final = 352  # of a frame: SLOT_NBYTES less the header
INLINE_NBYTES: Final = 360  # what the queue pair copies into the work request
MOST_NBYTES: Final = 368  # of one RDMA write

# Receiving.
ARRIVED: Final = 376  # messages
OPENED: Final = 384  # messages
UNPOSTED: Final = 392  # opened messages whose receive is not posted again yet
OWED: Final = 400  # receives posted again that the peer does not know of
SLOTS_AT: Final = 408  # frame memory that the peer writes to
QUEUE: Final = 416  # DEPTH immediates, by message
RECVS_AT: Final = 424  # REPOST_EVERY receive work requests, linked

# One put with payload may be under way on each channel, the last row is for channel -1.
PUTS: Final = 432
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

ARRIVALS: Final = PUTS + PUT_NBYTES * (N_CHANNELS + 1)  # N_CHANNELS words
RECORD_NBYTES: Final = -(-(ARRIVALS + 8 * N_CHANNELS) // 64) * 64

# Ids of work requests: the link's index, whether it is a receive, and the number of the work request.
ID_LINK_SHIFT: Final = 48
ID_RECV: Final = 1 << 47
ID_NUMBER_MASK: Final = ID_RECV - 1

# A peer's row in the table points to (number of links, their addresses).
ROW_N_LINKS: Final = 0
ROW_LINKS: Final = 8
MAX_RAILS: Final = 8
ROW_NBYTES: Final = ROW_LINKS + 8 * MAX_RAILS

# Why a link failed (FAULT_REASON).
REASON_LEFT: Final = 1
REASON_STATUS: Final = 2
REASON_POST: Final = 3
REASON_POLL: Final = 4
REASON_SIGNATURE: Final = 5
REASON_MAGIC: Final = 6
REASON_LATE: Final = 7
REASON_BUFFER: Final = 8
REASON_BOUNDS: Final = 9
REASON_CHANNEL: Final = 10
REASON_UNSIGNED: Final = 11
REASON_FAR_BOUNDS: Final = 12
REASON_ARGUMENT: Final = 13
REASON_OVERRUN: Final = 14

REASONS: Final[dict[int, str]] = {
    REASON_LEFT: "left after call {got}, and this is call {expected}",
    REASON_STATUS: "a work request ended with status {got}: {status} (vendor code {vendor:#x})",
    REASON_POST: "posting a work request failed with {got}",
    REASON_POLL: "polling for completions failed with {got}",
    REASON_SIGNATURE: "asked for something else in the same call: signature {got:#x} there, {expected:#x} here",
    REASON_MAGIC: "sent no frame: first word {got:#x}, expected {expected:#x}",
    REASON_LATE: "sent payload of call {got} while this rank is in call {expected}, or after that call's end",
    REASON_BUFFER: f"wrote to buffer {{got}}; a call has buffers 0 to {N_BUFFERS - 1}",
    REASON_BOUNDS: "wrote up to byte {got} of a buffer of {expected} bytes",
    REASON_CHANNEL: f"signalled channel {{got}}; there are channels 0 to {N_CHANNELS - 1}",
    REASON_UNSIGNED: "sent a message of call {got} before that call's signature",
    REASON_FAR_BOUNDS: "has announced a buffer of {expected} bytes, and this rank was to write up to byte {got}",
    REASON_ARGUMENT: "this rank called put or begin with an impossible argument: {got}",
    REASON_OVERRUN: "sent more messages than receives were posted for it: {got} of {expected}",
}
