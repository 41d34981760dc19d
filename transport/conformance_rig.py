"""Owns what the conformance checks stand on: subjects, endpoints with guarded memory, and two ways to call a table."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from gfkernels.native.jit import njit
from gfkernels.native.memory import call1, call3, call4, call5, call8
from gfkernels.transport.table import AGAIN, OK, Channels, Fault, Slot
from gfkernels.types import N_BUFFERS

ROUNDS: Final = 200_000
"""How often a check tries before it calls something stuck."""
GUARD_NBYTES: Final = 4096
_GUARD: Final = 0xA5

Bytes = npt.NDArray[np.uint8]


class ConformanceError(AssertionError):
    """The transport broke its contract; the text says which part."""


@dataclass(frozen=True)
class Subject:
    """A transport under test.

    Attributes:
        name: for reports.
        mesh: makes n connected endpoints in this process, in rank order.
        leave: closes one in order, after its last call; None where the transport knows no such thing.
        crash: closes one as the death of its process would; None likewise.
        framed: BEGIN exists: sequence, signature and bounds of what arrives are checked at the receiver.
        streamed: a put that finds no room holds up what comes behind it, as in a socket; signals queue there.
    """

    name: str
    mesh: Callable[[int], Sequence[Channels]]
    leave: Callable[[Channels], None] | None = None
    crash: Callable[[Channels], None] | None = None
    framed: bool = True
    streamed: bool = True


class Driver(Protocol):
    """A way to call `int64 f(int64, …)` at an address."""

    def __call__(self, function: int, *args: int) -> int: ...


@njit
def _call1(f: int, a: int) -> int:
    return call1(f, a)


@njit
def _call3(f: int, a: int, b: int, c: int) -> int:
    return call3(f, a, b, c)


@njit
def _call4(f: int, a: int, b: int, c: int, d: int) -> int:
    return call4(f, a, b, c, d)


@njit
def _call5(f: int, a: int, b: int, c: int, d: int, e: int) -> int:
    return call5(f, a, b, c, d, e)


@njit
def _call8(f: int, a: int, b: int, c: int, d: int, e: int, g: int, h: int, i: int) -> int:
    return call8(f, a, b, c, d, e, g, h, i)


_COMPILED: Final[dict[int, Any]] = {1: _call1, 3: _call3, 4: _call4, 5: _call5, 8: _call8}


def compiled(function: int, *args: int) -> int:
    """Calls as the engine does: from compiled code, without the GIL."""
    return int(_COMPILED[len(args)](function, *args))


def foreign(function: int, *args: int) -> int:
    """Calls through ctypes, as any C caller would."""
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(args))(function)(*args))


DRIVERS: Final[dict[str, Driver]] = {"compiled": compiled, "ctypes": foreign}


def address(array: npt.NDArray[Any]) -> int:
    """Where an array's first byte is."""
    return int(array.ctypes.data)


@dataclass
class Endpoint:
    """One rank of a mesh: its table, and buffers with guard bytes around them."""

    rank: int
    channels: Channels
    call: Driver
    _whole: dict[int, Bytes] = field(default_factory=dict)
    _rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((N_BUFFERS, 2), np.int64))

    @property
    def peers(self) -> list[int]:
        """Ranks that have a row."""
        return [q for q in range(len(self.channels.table)) if q != self.rank]

    def own(self, buffer: int, nbytes: int) -> Bytes:
        """Gives this rank a zeroed buffer of that size, guarded at both ends; call before `begin`."""
        whole = np.zeros(nbytes + 2 * GUARD_NBYTES, np.uint8)
        whole[:GUARD_NBYTES] = _GUARD
        whole[nbytes + GUARD_NBYTES :] = _GUARD
        self._whole[buffer] = whole
        inner = whole[GUARD_NBYTES : GUARD_NBYTES + nbytes]
        self._rows[buffer] = (address(inner), nbytes)
        return inner

    def claim(self, buffer: int, at: int, nbytes: int) -> None:
        """Declares a buffer at any address and size, for checks of arithmetic."""
        self._rows[buffer] = (at, nbytes)

    def check_guards(self) -> None:
        """Nothing may have been written outside the buffers."""
        for buffer, whole in self._whole.items():
            ends = np.concatenate([whole[:GUARD_NBYTES], whole[-GUARD_NBYTES:]])
            require(bool((ends == _GUARD).all()), f"rank {self.rank}: bytes outside buffer {buffer} were overwritten")

    def _function(self, peer: int, slot: Slot) -> tuple[int, int]:
        row = self.channels.table[peer]
        return int(row[slot]), int(row[Slot.STATE])

    def has(self, slot: Slot) -> bool:
        """Whether all peers' rows have this function."""
        return all(self.channels.table[q, slot] != 0 for q in self.peers)

    def begin(self, sequence: int, signature: int = 7) -> None:
        """Starts a call towards all peers."""
        for peer in self.peers:
            function, state = self._function(peer, Slot.BEGIN)
            if function:
                code = self.call(function, state, sequence, signature, address(self._rows))
                require(code == OK, f"begin({sequence}) answered {code}")

    def put(self, peer: Endpoint, channel: int, src: Bytes | None, buffer: int = 0, offset: int = 0) -> int:
        """One attempt; `src` None is a pure signal."""
        nbytes = 0 if src is None else len(src)
        return self.put_raw(peer, channel, 0 if src is None else address(src), buffer, offset, nbytes)

    def put_raw(self, peer: Endpoint, channel: int, src: int, buffer: int, offset: int, nbytes: int) -> int:
        """One attempt with any numbers."""
        function, state = self._function(peer.rank, Slot.PUT)
        base = int(peer._rows[buffer, 0]) if 0 <= buffer < N_BUFFERS else 0
        dst = base + offset if base and abs(offset) < 1 << 62 else 0
        return self.call(function, state, peer.rank, channel, src, dst, buffer, offset, nbytes)

    def get(self, peer: Endpoint, dst: Bytes, src: Bytes) -> int:
        """Pulls `src`, which lies at `peer`."""
        function, state = self._function(peer.rank, Slot.GET)
        return self.call(function, state, peer.rank, address(dst), address(src), len(dst))

    def poll(self, peer: Endpoint, channel: int = 0) -> int:
        """Arrivals from `peer`, or -Fault."""
        function, state = self._function(peer.rank, Slot.POLL)
        return self.call(function, state, peer.rank, channel)

    def progress(self) -> int:
        """All rows once; what happened, or the first -Fault."""
        total = 0
        for peer in self.peers:
            function, state = self._function(peer, Slot.PROGRESS)
            moved = self.call(function, state) if function else 0
            if moved < 0:
                return moved
            total += moved
        return total

    def flush(self) -> int:
        """All rows once: OK, AGAIN, or -Fault."""
        worst = OK
        for peer in self.peers:
            function, state = self._function(peer, Slot.FLUSH)
            code = self.call(function, state) if function else OK
            if code < 0:
                return code
            worst = max(worst, code)
        return worst


def require(condition: bool, text: str) -> None:
    """Raises ConformanceError unless `condition`."""
    if not condition:
        raise ConformanceError(text)


def until(condition: Callable[[], bool], endpoints: Sequence[Endpoint], text: str) -> None:
    """Makes progress on `endpoints` until `condition`; a fault or too many rounds is an error."""
    for _ in range(ROUNDS):
        if condition():
            return
        for endpoint in endpoints:
            code = endpoint.progress()
            require(code >= 0, f"{text}: progress answered {code} ({_fault(code)})")
    raise ConformanceError(f"{text}: did not happen in {ROUNDS} rounds")


def until_fault(step: Callable[[], int], fault: Fault, text: str) -> None:
    """Repeats `step` until it answers -fault; another fault, or none, is an error."""
    for _ in range(ROUNDS):
        code = step()
        if code < 0:
            require(code == -fault, f"{text}: {_fault(code)}, expected {fault.name}")
            return
    raise ConformanceError(f"{text}: no fault in {ROUNDS} rounds, expected {fault.name}")


def deliver(sender: Endpoint, receiver: Endpoint, channel: int, src: Bytes, buffer: int = 0, offset: int = 0) -> None:
    """Puts and sees it arrive."""
    before = receiver.poll(sender, max(channel, 0))
    sent = [AGAIN]

    def done() -> bool:
        if sent[0] == AGAIN:
            sent[0] = sender.put(receiver, channel, src, buffer, offset)
            require(sent[0] >= 0, f"put answered {sent[0]} ({_fault(sent[0])})")
        return sent[0] == OK and receiver.poll(sender, max(channel, 0)) == before + 1

    until(done, [sender, receiver], f"a put of {len(src)} bytes at offset {offset}")


def _fault(code: int) -> str:
    return Fault(-code).name if -code in set(Fault) else "no fault"


@contextmanager
def mesh(subject: Subject, size: int, call: Driver) -> Iterator[list[Endpoint]]:
    """Endpoints of a new mesh; guards are checked and connections closed at the end."""
    ends = [Endpoint(rank, channels, call) for rank, channels in enumerate(subject.mesh(size))]
    try:
        yield ends
        for end in ends:
            end.check_guards()
    finally:
        close = subject.crash or subject.leave
        for end in ends:
            if close is not None:
                close(end.channels)


def noise(nbytes: int, seed: int = 1) -> Bytes:
    """Reproducible random bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
