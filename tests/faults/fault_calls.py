"""Owns what ranks do in test_mismatch.py, test_refusal.py and test_injection.py."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from fault_rank import Rank

import gfkernels as gf
from gfkernels.transport.table import AGAIN, Slot

ODD = 1


def _odd_call(kind: str, odd: bool, x: Any, z: Any) -> Callable[[], Any]:
    calls: dict[str, Callable[[], Any]] = {
        "count": lambda: gf.allreduce(x[:11] if odd else x),
        "large count": lambda: gf.allreduce(z[:-1] if odd else z),
        "dtype": lambda: gf.allreduce(x.view(np.int32) if odd else x),
        "op": lambda: gf.allreduce(x, "max" if odd else "sum"),
        "order": lambda: gf.barrier() if odd else gf.allreduce(x),
        "wire": lambda: gf.allreduce(x, wire="float16" if odd else None),
        "root": lambda: gf.broadcast(x, 1 if odd else 0),
        "list": lambda: gf.allreduce_many([x] if odd else [x[:6], x[6:]]),
        "absent": lambda: gf.allreduce(x[:11] if odd else x),
    }
    return calls[kind]


def mismatch(rank: Rank, kinds: list[str]) -> None:
    """Ranks ask for different things, time after time, each time with a new communicator."""
    odd = rank.rank == ODD
    for kind in kinds:
        gf.init()
        x, z = np.ones(12, np.float32), np.ones(300_000, np.float32)
        if kind == "absent" and rank.rank == 2:
            rank.hear()
        rank.fails(_odd_call(kind, odd, x, z))
        rank.report("array", clean=bool(np.all(x == 1) and np.all(z == 1)))
        rank.fails(gf.barrier, "after")
        gf.shutdown()


def refuse(rank: Rank, when: str) -> None:
    """One rank's own bad array, or everybody's; then all go on."""
    gf.init()
    frozen = np.ones(5)
    frozen.flags.writeable = False
    gf.barrier()
    rank.report("ready")
    for i in range(1, 6):
        if when == "all" or rank.rank == ODD:
            if when == "late":
                rank.hear()  # the others are waiting by now
            rank.fails(lambda: gf.allreduce(frozen))
            rank.report("refused")
        elif when == "late":
            rank.report("entering")
            rank.fails(lambda: gf.allreduce(np.ones(5)))
        else:
            rank.hear()
        for _ in range(20):
            x = np.full(5, i)
            gf.allreduce(x)
            assert np.all(x == i * rank.size)
    rank.report("went on")
    gf.barrier()
    gf.shutdown()


_PUT = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 8)
_POLL = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def inject(rank: Rank, what: str, bad: int) -> None:
    """A transport that is often busy, or reports a fault after a while."""
    comm = gf.init()
    core = comm._core
    assert core is not None
    table = core.plane.channels.table
    x = np.ones(700_000, np.float32)
    gf.allreduce(x)
    counted = {"calls": 0, "injected": 0}
    kept: list[Any] = []
    for q in range(rank.size) if rank.rank == bad else ():
        if q == rank.rank:
            continue
        put, poll = _PUT(int(table[q, Slot.PUT])), _POLL(int(table[q, Slot.POLL]))

        def busy(*arguments: int, put: Any = put) -> int:
            counted["calls"] += 1
            if counted["calls"] % 7:
                counted["injected"] += 1
                return AGAIN
            return int(put(*arguments))

        def faulty(*arguments: int, poll: Any = poll) -> int:
            counted["calls"] += 1
            if counted["calls"] > 5:
                counted["injected"] += 1
                return -int(what)
            return int(poll(*arguments))

        if what == "busy":
            kept.append(_PUT(busy))
            table[q, Slot.PUT] = _address(kept[-1])
        else:
            kept.append(_POLL(faulty))
            table[q, Slot.POLL] = _address(kept[-1])
    comm.barrier() if what == "busy" else time.sleep(0)

    def calls() -> None:
        for _ in range(8):
            x[:] = 1
            gf.allreduce(x)
            assert np.all(x == rank.size), "a wrong sum"

    rank.fails(calls)
    rank.report("counted", **counted)
    rank.hear()
    gf.shutdown()
