"""Owns what ranks do in test_means.py: too little memory, too few cores, worlds that do not match."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
from fault_rank import Rank

import gfkernels as gf

LARGE = 50 << 20
"""200 MB of float32."""


def tiny_arena(rank: Rank) -> None:
    """An array that does not fit is refused; smaller ones and calls still work."""
    gf.init()
    rank.fails(lambda: gf.empty(LARGE))
    kept = []

    def fill() -> None:
        while True:
            kept.append(gf.empty(1 << 20))

    rank.fails(fill, "filled")
    kept.clear()
    x = gf.empty(1 << 20)
    x[:] = 1
    gf.allreduce(x)
    rank.report("sum", clean=bool(np.all(x == rank.size)))
    gf.barrier()
    gf.shutdown()


def crowd(rank: Rank, cores: list[int]) -> None:
    """More ranks than cores."""
    os.sched_setaffinity(0, cores)
    gf.init()
    assert os.sched_getaffinity(0) == set(cores)
    x, y = np.ones(500_000, np.float32), np.ones(3)
    for _ in range(10):
        x[:], y[:] = 1, 1
        work = gf.allreduce(x, async_op=True)
        gf.allreduce(y)
        work.wait()
        assert np.all(x == rank.size) and np.all(y == rank.size)
    rank.report("cores", cores=sorted(os.sched_getaffinity(0)))
    gf.barrier()
    gf.shutdown()


def strangers(rank: Rank, what: str) -> None:
    """Rank 1 is set up differently from the others, or rank 2 never comes."""
    if what == "missing" and rank.rank == 2:
        rank.hear()
        return
    if rank.rank == 1 and what == "secret":
        rank.fails(lambda: gf.init(secret="another secret"))
    elif rank.rank == 1 and what == "size":
        rank.fails(lambda: gf.init(rank=1, size=4))
    elif rank.rank == 1 and what == "rank":
        rank.fails(lambda: gf.init(rank=0, size=3))
    else:
        rank.fails(gf.init)
    rank.report("state", initialized=gf.is_initialized())
    rank.hear()


def _large_sums() -> None:
    comm = gf.init()
    x = gf.empty(LARGE)
    x[:] = 1
    gf.allreduce(x)
    y = np.ones(LARGE, np.float32)
    gf.allreduce(y)
    stat = os.statvfs("/dev/shm")
    wrong = int(np.count_nonzero(x != comm.size) + np.count_nonzero(y != comm.size))
    sys.stdout.write(json.dumps({"wrong": wrong, "shm": stat.f_blocks * stat.f_frsize}) + "\n")
    gf.shutdown()


if __name__ == "__main__":
    _large_sums()
