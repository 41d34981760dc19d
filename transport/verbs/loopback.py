"""Owns the test of one port against itself: two ranks in this process, connected as real ones, one signal each way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from gfkernels.errors import ConnectError, GfkernelsError
from gfkernels.transport.meeting import Exchange
from gfkernels.transport.table import Slot
from gfkernels.transport.verbs.channels import VerbsChannels
from gfkernels.transport.verbs.connect import connect
from gfkernels.transport.verbs.rail import close_rails, open_rails
from gfkernels.transport.verbs.settings import Settings
from gfkernels.transport.verbs.table import begin, poll, progress, put
from gfkernels.types import N_BUFFERS

_ROUNDS: Final = 16
_BARRIER_S: Final = 300.0


@dataclass(frozen=True)
class Loopback:
    """What `loopback_check` found.

    Attributes:
        ok: both directions work.
        reason: why not, with the remedy; "" where they do.
        port: the port that was used.
        one_way_us: time of a signal, the best of a few; 0.0 where there was none.
        compiled: messages go without the interpreter.
    """

    ok: bool
    reason: str
    port: str = ""
    one_way_us: float = 0.0
    compiled: bool = False


def loopback_check(device: str | None = None, *, settings: Settings | None = None, timeout_s: float = 10.0) -> Loopback:
    """Connects a port with itself and measures a signal.

    Args:
        device: as the setting takes it; None: the port that would be chosen.
        settings: everything else that can be set.
        timeout_s: how long the connection may take.
    """
    settings = replace(settings or Settings(), device=device)
    port = ""
    try:
        rails = open_rails(settings)
        port = rails[0].choice.port.name
        try:
            ends = in_threads(
                lambda rank, exchange: connect(
                    rank, 2, exchange=exchange, rails=rails[:1], settings=settings, timeout_s=timeout_s
                ),
                2,
            )
            try:
                one_way = _ping(ends, timeout_s)
                compiled = all(end.compiled for end in ends)
            finally:
                for end in ends:
                    end.close()
        finally:
            close_rails(rails)
    except GfkernelsError as error:
        return Loopback(False, str(error), port)
    return Loopback(True, "", port, one_way, compiled)


def in_threads(part: Callable[[int, Exchange], Any], size: int, *, patience_s: float = _BARRIER_S) -> list[Any]:
    """Runs `part(rank, exchange)` for all ranks of a group in threads of this process; results in rank order.

    Args:
        part: what a rank does.
        size: ranks.
        patience_s: how long an exchange waits for the other ranks.

    Raises:
        Exception: the first that a part raised, in rank order.
    """
    values: list[Any] = [None] * size
    results: list[Any] = [None] * size
    errors: dict[int, Exception] = {}
    barrier = threading.Barrier(size)

    def run(rank: int) -> None:
        def exchange(value: object) -> list[Any]:
            values[rank] = value
            barrier.wait(patience_s)
            everyone = list(values)
            barrier.wait(patience_s)
            return everyone

        try:
            results[rank] = part(rank, exchange)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return results


def _ping(ends: list[VerbsChannels], timeout_s: float) -> float:
    """Signals back and forth; µs one way, the best of a few."""
    nothing = np.zeros((N_BUFFERS, 2), np.int64)
    states = [int(end.table[1 - end.rank, Slot.STATE]) for end in ends]
    for state in states:
        begin.ctypes(state, 1, 1, int(nothing.ctypes.data))
    best = float("inf")
    deadline = time.monotonic() + timeout_s
    for count in range(1, _ROUNDS + 1):
        start = time.perf_counter()
        for me in (0, 1):
            put.ctypes(states[me], 1 - me, 0, 0, 0, 0, 0, 0)
            while poll.ctypes(states[1 - me], me, 0) != count:
                for rank, state in enumerate(states):
                    if progress.ctypes(state) < 0:
                        raise ends[rank].error(1 - rank)
                if time.monotonic() > deadline:
                    raise ConnectError(f"signal {count} did not arrive in {timeout_s:g} s")
        best = min(best, (time.perf_counter() - start) / 2 * 1e6)
    return best
