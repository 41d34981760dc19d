"""Owns what ranks do in test_stop.py and test_interrupt.py."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from fault_rank import Rank

import gfkernels as gf

LARGE = 2_000_000
FILL = -7.0


def _array(memory: str) -> Any:
    return gf.empty(LARGE) if memory == "registered" else np.empty(LARGE, np.float32)


def reuse(rank: Rank, memory: str, victim: int) -> None:
    """Calls until the victim is stopped; then uses the memory of the failed call for something else."""
    gf.init()
    x = _array(memory)
    x[:] = 1
    gf.allreduce(x)
    rank.report("ready")

    def calls(x: Any) -> None:
        while True:
            x[:] = 1
            gf.allreduce(x)

    error = rank.fails(functools.partial(calls, x))
    assert error is not None
    error.__traceback__ = error.__context__ = error.__cause__ = None  # they would keep the array
    del x
    if rank.rank != victim:
        others = [_array(memory) for _ in range(3)] + [_array("ordinary")]
        for other in others:
            other[:] = FILL
        rank.report("reused")
        assert rank.hear() == "check"
        rank.report("untouched", clean=[bool(np.all(other == FILL)) for other in others])
    rank.fails(lambda: gf.allreduce(np.ones(3)), "after")
    gf.shutdown()


def steps(rank: Rank) -> None:
    """Many short calls with pauses; nothing fails."""
    gf.init()
    x, y = np.ones(1000), gf.empty(500_000)
    rank.report("ready")
    for _ in range(25):
        x[:], y[:] = 1, 1
        gf.allreduce(x)
        gf.allreduce(y)
        time.sleep(0.03)
        assert np.all(x == rank.size) and np.all(y == rank.size)
    rank.report("done")
    gf.barrier()
    gf.shutdown()


def late(rank: Rank) -> None:
    """Rank 1 comes when the test says so; the others wait for it."""
    gf.init()
    gf.barrier()
    rank.report("ready")
    if rank.rank == 1:
        rank.hear()
    x = np.ones(10)
    rank.fails(lambda: gf.allreduce(x))
    rank.report("sum", value=float(x[0]))
    rank.fails(gf.barrier, "after")
    gf.shutdown()


def interrupted(rank: Rank, way: str, victim: int, absent: int) -> None:
    """Blocks in a call of the named way, until Ctrl-C."""
    gf.init()
    x = np.ones(LARGE if way == "large" else 1000, np.float32)
    handle = gf.plan_allreduce(x)
    gf.allreduce(x)

    def loop() -> None:
        while True:
            gf.allreduce(x)

    calls: dict[str, Callable[[], Any]] = {
        "call": gf.barrier,
        "large": loop,
        "handle": handle,
        "wait": lambda: gf.allreduce(x, async_op=True).wait(),
    }
    x[:] = 0
    rank.report("ready")
    if rank.rank == absent and way != "large":
        rank.hear()
    rank.fails(calls[way])
    rank.fails(gf.barrier, "after")
    gf.shutdown()
