"""Owns what travels on a TCP connection, and the words of a connection's record beyond those of `framed`.

A frame is a header, then `nbytes` of payload.
"""

from __future__ import annotations

from typing import Final

from gfkernels.transport import framed as c

VERSION: Final = 1
"""Of frames and handshake together; both ends of a connection must have the same."""

MAGIC_WORD: Final = 0x31304D4152464B47  # b"GKFRAM01"
KIND_PUT: Final = 0
KIND_GOODBYE: Final = 1
"""The sender leaves after call `sequence`, having sent all it owed; only then is the end of the stream no fault."""

# Byte offsets in a connection's record (int64 words).
FD: Final = c.OWN_WORDS + 0
FAULT_ERRNO: Final = c.OWN_WORDS + 8
MESSAGE: Final = c.OWN_WORDS + 16  # address of a msghdr and its iovecs, set up once

# Sending: `early` bytes go before the payload in progress, `late` ones after it.
EARLY: Final = c.OWN_WORDS + 24
EARLY_START: Final = c.OWN_WORDS + 32
EARLY_END: Final = c.OWN_WORDS + 40
LATE: Final = c.OWN_WORDS + 48
LATE_END: Final = c.OWN_WORDS + 56
PAYLOAD: Final = c.OWN_WORDS + 64  # PAYLOAD_NONE, PAYLOAD_SENDING, PAYLOAD_SENT
PAYLOAD_AT: Final = c.OWN_WORDS + 72
PAYLOAD_LEFT: Final = c.OWN_WORDS + 80
KEY_CHANNEL: Final = c.OWN_WORDS + 88  # which put the payload belongs to
KEY_SRC: Final = c.OWN_WORDS + 96
KEY_BUFFER: Final = c.OWN_WORDS + 104
KEY_OFFSET: Final = c.OWN_WORDS + 112
KEY_NBYTES: Final = c.OWN_WORDS + 120
SEND_DEAD: Final = c.OWN_WORDS + 128  # 1: the peer no longer reads

# Receiving: `ahead` holds bytes read beyond what was asked for.
AHEAD: Final = c.OWN_WORDS + 136
AHEAD_START: Final = c.OWN_WORDS + 144
AHEAD_END: Final = c.OWN_WORDS + 152
LAND_AT: Final = c.OWN_WORDS + 160
LAND_LEFT: Final = c.OWN_WORDS + 168
LAND_CHANNEL: Final = c.OWN_WORDS + 176
RECORD_NBYTES: Final = -(-(c.OWN_WORDS + 184) // 64) * 64

PAYLOAD_NONE: Final = 0
PAYLOAD_SENDING: Final = 1
PAYLOAD_SENT: Final = 2
"""All sent, but the put that owns it has not been told yet."""

QUEUE_NBYTES: Final = 32 * 1024
"""Of `early` and `late` each: 512 signals may wait for a busy socket."""
AHEAD_NBYTES: Final = 2048

# Why a connection failed (FAULT_REASON), beyond what `framed` knows.
REASON_CLOSED: Final = c.OWN_REASONS
REASON_SYSTEM: Final = c.OWN_REASONS + 1
REASON_CUT: Final = c.OWN_REASONS + 2

REASONS: Final[dict[int, str]] = {
    **c.REASONS,
    REASON_CLOSED: "the connection ended without a goodbye: the process died or was killed",
    REASON_SYSTEM: "the system call failed",
    REASON_CUT: "this rank ended call {expected} while {got} bytes of a frame were still to come",
}
