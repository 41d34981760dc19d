"""Owns what transports with frames have in common: a frame's header, the words that every connection's record begins
with, and the errors that its faults turn into. `framed_code` is the compiled half.

A header is eight little-endian int64 words. Every frame carries the sequence number and the signature of the call that
it belongs to, so ranks that disagree find out before a byte lands.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from gfkernels.errors import MismatchError, PeerLostError, TransportError, UnavailableError
from gfkernels.transport.table import Channels, Fault, Slot
from gfkernels.types import N_BUFFERS, N_CHANNELS

if sys.byteorder != "little":
    raise UnavailableError("frames are little-endian and this machine is not", "Use transport='shm' on one host")

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

# Byte offsets in a record (int64 words); a transport's own words follow.
CALL: Final = 0  # the running call's sequence number
CALL_SIGNATURE: Final = 8
LANDING: Final = 16  # 1 between BEGIN and FLUSH: payload may land
FAULT: Final = 24  # a Fault, 0 while all is well; never reset
FAULT_REASON: Final = 32
FAULT_EXPECTED: Final = 40
FAULT_GOT: Final = 48
FAULT_CALL: Final = 56  # the call in which a peer asked for something else
LEFT: Final = 64  # 1: the peer said goodbye
LEFT_CALL: Final = 72
MOVED: Final = 80  # what has moved since PROGRESS last reported
ARRIVALS: Final = 88  # N_CHANNELS words
BUFFERS: Final = ARRIVALS + 8 * N_CHANNELS  # N_BUFFERS rows of (address, nbytes)
SIGNATURES: Final = BUFFERS + 16 * N_BUFFERS  # N_SIGNATURES rows of (sequence, signature), by sequence
N_SIGNATURES: Final = 16
"""Calls whose late frames are still compared: a peer may be that far behind with a credit."""
OWN_WORDS: Final = SIGNATURES + 16 * N_SIGNATURES

# Why a connection failed (FAULT_REASON); a transport's own reasons count from OWN_REASONS.
REASON_LEFT: Final = 1
REASON_SIGNATURE: Final = 2
REASON_MAGIC: Final = 3
REASON_LATE: Final = 4
REASON_BUFFER: Final = 5
REASON_BOUNDS: Final = 6
REASON_CHANNEL: Final = 7
REASON_ARGUMENT: Final = 8
OWN_REASONS: Final = 16

REASONS: Final[dict[int, str]] = {
    REASON_LEFT: "left after call {got}, and this is call {expected}",
    REASON_SIGNATURE: "asked for something else in the same call: signature {got:#x} there, {expected:#x} here",
    REASON_MAGIC: "sent no frame: first word {got:#x}, expected {expected:#x}",
    REASON_LATE: "sent payload of call {got} while this rank is in call {expected}, or after that call's end",
    REASON_BUFFER: f"wrote to buffer {{got}}; a call has buffers 0 to {N_BUFFERS - 1}",
    REASON_BOUNDS: "wrote up to byte {got} of a buffer of {expected} bytes",
    REASON_CHANNEL: f"signalled channel {{got}}; there are channels 0 to {N_CHANNELS - 1}",
    REASON_ARGUMENT: "this rank called put or begin with an impossible argument: {got}",
}


@dataclass
class FramedChannels(Channels, ABC):
    """A rank's end of a transport with frames.

    Attributes:
        rank: this rank.
    """

    rank: int = -1
    reasons: ClassVar[dict[int, str]] = REASONS
    """Texts by FAULT_REASON, the transport's own among them."""

    @abstractmethod
    def record(self, peer: int) -> npt.NDArray[np.int64]:
        """The record of the connection to `peer`; of several, one with a fault."""

    @abstractmethod
    def explain(self, peer: int) -> str:
        """What is wrong with the connection to `peer`, in words."""

    @abstractmethod
    def sever(self) -> None:
        """After a failure: nothing that is under way may land in this rank's memory any more."""

    @abstractmethod
    def close(self, timeout_s: float = 2.0, *, leave: bool = True) -> None:
        """Closes all connections; does nothing the second time.

        Args:
            timeout_s: how long to wait for peers to take what is on its way to them.
            leave: say goodbye, so that peers still in the last call are not disturbed; False after a failure.
        """

    @abstractmethod
    def close_in_child(self) -> None:
        """Gives up a forked child's copies; the parent's connections go on."""

    def install(self, peer: int, state: int, *, put: Any, poll: Any, progress: Any, begin: Any, flush: Any) -> None:
        """Fills a peer's row of the table: the state, and the C functions (of `numba.cfunc`) that act on it."""
        self.table[peer, Slot.STATE] = state
        functions = {Slot.PUT: put, Slot.POLL: poll, Slot.PROGRESS: progress, Slot.BEGIN: begin, Slot.FLUSH: flush}
        for slot, function in functions.items():
            self.table[peer, slot] = function.address

    def reason(self, peer: int, **more: Any) -> str:
        """The text for the record's fault, with what it expected and got, and the transport's own facts."""
        words = self.record(peer)
        text = self.reasons.get(int(words[FAULT_REASON // 8]), "nothing is wrong")
        return text.format(expected=int(words[FAULT_EXPECTED // 8]), got=int(words[FAULT_GOT // 8]), **more)

    def fault(self, peer: int) -> Fault | None:
        """What is wrong with the connection to `peer`, None while nothing is."""
        word = int(self.record(peer)[FAULT // 8])
        return Fault(word) if word else None

    def error(self, peer: int) -> TransportError:
        """The exception for the fault on the connection to `peer`."""
        fault = self.fault(peer)
        if fault is Fault.PEER_LOST:
            return PeerLostError(self.explain(peer), peer)
        return MismatchError(self.explain(peer)) if fault is Fault.MISMATCH else TransportError(self.explain(peer))

    def mismatched_call(self, peer: int) -> int:
        """After `Fault.MISMATCH`: the number of the call that it was in, this one or an earlier one."""
        return int(self.record(peer)[FAULT_CALL // 8])
