"""Owns what travels on a TCP connection: the frame header, and the words of a connection's record.

A frame is eight little-endian int64 words, then `nbytes` of payload. Every frame carries the sequence number and the
signature of the call that it belongs to, so ranks that disagree find out before a byte lands.
"""

from __future__ import annotations

import sys
from typing import Final

from gfkernels.errors import UnavailableError
from gfkernels.types import N_BUFFERS, N_CHANNELS

if sys.byteorder != "little":
    raise UnavailableError("frames are little-endian and this machine is not", "Use transport='shm' on one host")

VERSION: Final = 1
"""Of frames and handshake together; both ends of a connection must have the same."""

# Byte offsets in a header.
MAGIC: Final = 0
KIND: Final = 8
SEQUENCE: Final = 16
SIGNATURE: Final = 24
CHANNEL: Final = 32
BUFFER: Final = 40
OFFSET: Final = 48
NBYTES: Final = 56
HEADER_NBYTES: Final = 64

MAGIC_WORD: Final = 0x31304D4152464B47  # b"GKFRAM01"
KIND_PUT: Final = 0
KIND_GOODBYE: Final = 1
"""The sender leaves after call `sequence`, having sent all it owed; only then is the end of the stream no fault."""

# Byte offsets in a connection's record (int64 words).
FD: Final = 0
PEER: Final = 8
CALL: Final = 16  # the running call's sequence number
CALL_SIGNATURE: Final = 24
LANDING: Final = 32  # 1 between BEGIN and FLUSH: payload may land
FAULT: Final = 40  # a Fault, 0 while all is well; never reset
FAULT_ERRNO: Final = 48
FAULT_REASON: Final = 56
FAULT_EXPECTED: Final = 64
FAULT_GOT: Final = 72
MOVED: Final = 80  # bytes moved since PROGRESS last reported
MESSAGE: Final = 88  # address of a msghdr and its iovecs, set up once

# Sending: `early` bytes go before the payload in progress, `late` ones after it.
EARLY: Final = 96
EARLY_START: Final = 104
EARLY_END: Final = 112
LATE: Final = 120
LATE_END: Final = 128
PAYLOAD: Final = 136  # PAYLOAD_NONE, PAYLOAD_SENDING, PAYLOAD_SENT
PAYLOAD_AT: Final = 144
PAYLOAD_LEFT: Final = 152
KEY_CHANNEL: Final = 160  # which put the payload belongs to
KEY_SRC: Final = 168
KEY_BUFFER: Final = 176
KEY_OFFSET: Final = 184
KEY_NBYTES: Final = 192
SEND_DEAD: Final = 200  # 1: the peer no longer reads

# Receiving: `ahead` holds bytes read beyond what was asked for.
AHEAD: Final = 208
AHEAD_START: Final = 216
AHEAD_END: Final = 224
LAND_AT: Final = 232
LAND_LEFT: Final = 240
LAND_CHANNEL: Final = 248
LEFT: Final = 256  # 1: the peer said goodbye
LEFT_CALL: Final = 264
FAULT_CALL: Final = 272  # the call in which a peer asked for something else

ARRIVALS: Final = 280  # N_CHANNELS words
BUFFERS: Final = ARRIVALS + 8 * N_CHANNELS  # N_BUFFERS rows of (address, nbytes)
SIGNATURES: Final = BUFFERS + 16 * N_BUFFERS  # N_SIGNATURES rows of (sequence, signature), by sequence
N_SIGNATURES: Final = 16
"""Calls whose late frames are still compared: a peer may be that far behind with a credit."""
RECORD_NBYTES: Final = -(-(SIGNATURES + 16 * N_SIGNATURES) // 64) * 64

PAYLOAD_NONE: Final = 0
PAYLOAD_SENDING: Final = 1
PAYLOAD_SENT: Final = 2
"""All sent, but the put that owns it has not been told yet."""

QUEUE_NBYTES: Final = 32 * 1024
"""Of `early` and `late` each: 512 signals may wait for a busy socket."""
AHEAD_NBYTES: Final = 2048

# Why a connection failed (FAULT_REASON).
REASON_CLOSED: Final = 1
REASON_LEFT: Final = 2
REASON_SYSTEM: Final = 3
REASON_SIGNATURE: Final = 4
REASON_MAGIC: Final = 5
REASON_LATE: Final = 6
REASON_BUFFER: Final = 7
REASON_BOUNDS: Final = 8
REASON_CHANNEL: Final = 9
REASON_CUT: Final = 10
REASON_ARGUMENT: Final = 11

REASONS: Final[dict[int, str]] = {
    REASON_CLOSED: "the connection ended without a goodbye: the process died or was killed",
    REASON_LEFT: "left after call {got}, and this is call {expected}",
    REASON_SYSTEM: "the system call failed",
    REASON_SIGNATURE: "asked for something else in the same call: signature {got:#x} there, {expected:#x} here",
    REASON_MAGIC: "sent no frame: first word {got:#x}, expected {expected:#x}",
    REASON_LATE: "sent payload of call {got} while this rank is in call {expected}, or after that call's end",
    REASON_BUFFER: f"wrote to buffer {{got}}; a call has buffers 0 to {N_BUFFERS - 1}",
    REASON_BOUNDS: "wrote up to byte {got} of a buffer of {expected} bytes",
    REASON_CHANNEL: f"signalled channel {{got}}; there are channels 0 to {N_CHANNELS - 1}",
    REASON_CUT: "this rank ended call {expected} while {got} bytes of a frame were still to come",
    REASON_ARGUMENT: "this rank called put or begin with an impossible argument: {got}",
}
