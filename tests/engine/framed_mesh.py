"""Owns a transport made of ctypes callbacks: frames between ranks of one process, late and refused as a lot decides.

It keeps the rules of a framed transport (see `gfkernels.transport.tcp`) and notes every breach: payload lands only
between the receiver's BEGIN and FLUSH, frames of a later call wait, and a put that answered AGAIN must be made again.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gfkernels.transport.table import AGAIN, N_SLOTS, OK, Channels, Fault, Slot
from gfkernels.types import N_BUFFERS, N_CHANNELS

_I64 = ctypes.c_int64
_ARITY = {Slot.PUT: 8, Slot.POLL: 3, Slot.PROGRESS: 1, Slot.BEGIN: 4, Slot.FLUSH: 1}


@dataclass
class _Frame:
    call: int
    signature: int
    channel: int
    buffer: int
    offset: int
    payload: bytes


@dataclass
class _End:
    """What one rank knows of its connection to one peer."""

    rank: int
    peer: int
    call: int = -1
    signature: int = 0
    landing: bool = False
    places: list[tuple[int, int]] = field(default_factory=list)
    outbox: deque[_Frame] = field(default_factory=deque)
    wire: deque[_Frame] = field(default_factory=deque)
    arrivals: list[int] = field(default_factory=lambda: [0] * N_CHANNELS)


class FramedMesh:
    """All connections of a group.

    Args:
        size: ranks.
        seed: of the lot.
        again: how often a put or flush answers AGAIN, and a frame stays where it is: from 0 to 1.

    Attributes:
        ends: what `World` takes.
        breaches: rules that were broken.
        refused: how often a put answered AGAIN.
        unsettled: puts that answered AGAIN and have not been made again.
        accepted: puts that were taken, by (rank, peer, channel).
    """

    def __init__(self, size: int, *, seed: int = 0, again: float = 0.4) -> None:
        self.size, self._again, self._lot = size, again, random.Random(seed)
        self._pairs = [_End(i // size, i % size) for i in range(size * size)]
        self.breaches: list[str] = []
        self.refused = 0
        self.unsettled: Counter[tuple[int, ...]] = Counter()
        self.accepted: Counter[tuple[int, int, int]] = Counter()
        handlers: dict[Slot, Callable[..., int]] = {
            Slot.PUT: self._put,
            Slot.POLL: self._poll,
            Slot.PROGRESS: self._progress,
            Slot.BEGIN: self._begin,
            Slot.FLUSH: self._flush,
        }
        self.callbacks: dict[Slot, Any] = {
            slot: ctypes.CFUNCTYPE(_I64, *(_I64,) * _ARITY[slot])(self._guarded(handler))
            for slot, handler in handlers.items()
        }
        self.ends = [self._table(rank) for rank in range(size)]

    def _table(self, rank: int) -> Channels:
        table: npt.NDArray[np.int64] = np.zeros((self.size, N_SLOTS), np.int64)
        for peer in range(self.size):
            if peer != rank:
                table[peer, Slot.STATE] = rank * self.size + peer
                for slot, callback in self.callbacks.items():
                    table[peer, slot] = ctypes.cast(callback, ctypes.c_void_p).value or 0
        return Channels(table=table, keep=[self], block_fds=[])

    def _guarded(self, handler: Callable[..., int]) -> Callable[..., int]:
        def run(state: int, *arguments: int) -> int:
            # An exception in a callback would be printed and lost.
            try:
                return handler(self._pairs[state], *arguments)
            except Exception as error:
                self.breaches.append(repr(error))
                return -int(Fault.SYSTEM)

        return run

    def _breach(self, end: _End, text: str) -> int:
        self.breaches.append(f"rank {end.rank}, peer {end.peer}: {text}")
        return -int(Fault.PROTOCOL)

    def in_flight(self) -> int:
        """Frames that a rank accepted and that have not left it."""
        return sum(len(end.outbox) for end in self._pairs)

    # -- the table's functions ---------------------------------------------------------------------------------

    def _put(
        self, end: _End, peer: int, channel: int, src: int, dst: int, buffer: int, offset: int, nbytes: int
    ) -> int:
        if peer != end.peer or not end.landing:
            return self._breach(end, f"a put to rank {peer} outside a call")
        key = (end.rank, peer, channel, src, buffer, offset, nbytes)
        if self._lot.random() < self._again:
            self.refused += 1
            self.unsettled[key] = 1
            return AGAIN
        self.unsettled.pop(key, None)
        self.accepted[end.rank, peer, channel] += 1
        payload = ctypes.string_at(src, nbytes) if nbytes else b""
        end.outbox.append(_Frame(end.call, end.signature, channel, buffer, offset, payload))
        return OK

    def _poll(self, end: _End, peer: int, channel: int) -> int:
        return end.arrivals[channel] if peer == end.peer else self._breach(end, f"polled for rank {peer}")

    def _progress(self, end: _End) -> int:
        happened = 0
        if end.outbox and self._lot.random() >= self._again:
            self._leave(end)
            happened += 1
        if end.wire and self._lot.random() >= self._again:
            code = self._land(end)
            if code < 0:
                return code
            happened += code
        return happened

    def _leave(self, end: _End) -> None:
        self._pairs[end.peer * self.size + end.rank].wire.append(end.outbox.popleft())

    def _land(self, end: _End) -> int:
        frame = end.wire[0]
        if frame.call > end.call:
            return 0
        if frame.payload:
            if frame.call < end.call or not end.landing:
                return self._breach(end, f"payload of call {frame.call} after it")
            if frame.signature != end.signature:
                return -int(Fault.MISMATCH)
            address, nbytes = end.places[frame.buffer]
            if address == 0 or frame.offset + len(frame.payload) > nbytes:
                return self._breach(end, f"{len(frame.payload)} bytes for buffer {frame.buffer} of {nbytes}")
            ctypes.memmove(address + frame.offset, frame.payload, len(frame.payload))
        end.wire.popleft()
        if frame.channel >= 0:
            end.arrivals[frame.channel] += 1
        return 1

    def _begin(self, end: _End, sequence: int, signature: int, buffers: int) -> int:
        if sequence <= end.call or end.landing:
            return self._breach(end, f"call {sequence} begins after {end.call}")
        words = (_I64 * (2 * N_BUFFERS)).from_address(buffers)
        end.places = [(words[2 * i], words[2 * i + 1]) for i in range(N_BUFFERS)]
        end.call, end.signature, end.landing = sequence, signature, True
        return OK

    def _flush(self, end: _End) -> int:
        # Once all has left it stays so: the engine asks every peer again until all of them say OK.
        if end.landing and self._lot.random() < self._again:
            return AGAIN
        if end.outbox:
            self._leave(end)
            return AGAIN
        end.landing = False
        return OK
