"""Owns what ranks do in test_life.py and test_forks.py: end in several ways, start again, fork."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
from fault_rank import Rank, resources

import gfkernels as gf


def end(rank: Rank, how: str, victim: int) -> None:
    """The victim ends in the named way while the others wait for it, or come later."""
    comm = gf.init()
    gf.allreduce(np.ones(1000))
    rank.report("ready")
    if rank.rank == victim:
        rank.hear()
        if how == "shutdown":
            gf.shutdown()
        elif how == "exit":
            sys.exit(3)
        elif how == "crash":
            raise ValueError("boom")
        elif how == "_exit":
            os._exit(5)
        elif how == "abort":
            comm.abort("enough of this")
            rank.fails(gf.barrier, "after")
        return
    rank.fails(lambda: gf.allreduce(np.ones(1000)))
    rank.fails(gf.barrier, "after")
    gf.shutdown()


def leave_early(rank: Rank, times: int, seed: int) -> None:
    """Every rank leaves as soon as its own last call is over, at random times."""
    chance = random.Random(seed + rank.rank)
    for _ in range(times):
        comm = gf.init()
        for i in range(3):
            part = comm.split(0)
            assert part is not None
            x = np.ones(3000 if i else 200_000)
            part.allreduce(x)
            time.sleep(chance.random() * 0.004)
            part.allreduce(x)
            part.shutdown()
            assert np.all(x == rank.size**2)
        x = np.ones(50)
        comm.allreduce(x)
        gf.shutdown()
        assert np.all(x == rank.size)
    rank.report("done", times=times * 4)


def cycles(rank: Rank, times: int) -> None:
    """Starts and ends many times, in order and by a break in turn; counts what is left behind."""
    counts = []
    for i in range(times):
        comm = gf.init()
        broken = i % 3 == 2
        x: Any = gf.empty(50_000)
        x[:] = 1
        comm.allreduce(x)
        assert np.all(x == rank.size)
        # Who aborts has left a call in which others may still be: the abort ends it, or the next.
        with suppress(*([gf.GfkernelsError] if broken else [])):
            comm.allreduce(np.ones(5), async_op=True).wait()
            comm.barrier()
            if broken and rank.rank == i % rank.size:
                comm.abort("on purpose")
            if broken:
                comm.barrier()
        assert comm.is_usable != broken
        gf.shutdown()
        del x, comm
        counts.append(resources())
    rank.report("counts", counts=counts)


def fork(rank: Rank) -> None:
    """A forked child may not call, and takes nothing with it when it ends."""
    gf.init()
    x = np.ones(5)
    gf.allreduce(x)
    for leave in (sys.exit, os._exit):  # through atexit, which must leave the parent's things alone; at once
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (lambda: gf.allreduce(np.ones(5)), gf.barrier, lambda: gf.allreduce(x, async_op=True).wait()):
                try:
                    call()
                except gf.UsageError:
                    refused += 1
            leave(40 + refused)
        _, status = os.waitpid(child, 0)
        rank.report("child", status=os.waitstatus_to_exitcode(status))
        for _ in range(10):
            x[:] = 1
            gf.allreduce(x)
            assert np.all(x == rank.size)
    gf.barrier()
    gf.shutdown()


def _square(x: int) -> int:
    return x * x


def pool(rank: Rank) -> None:
    """Worker processes, forked in the middle of calls, beside the communicator."""
    gf.init()
    x, large = np.ones(5), gf.empty(300_000)
    gf.allreduce(x)
    works = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tested
        for i in range(3):
            large[:] = 1
            works.append(gf.allreduce(large, async_op=True))
            with multiprocessing.get_context("fork").Pool(2) as workers:
                assert workers.map(_square, range(20)) == [n * n for n in range(20)]
                works[-1].wait()
                assert np.all(large == rank.size)
                x[:] = i
                gf.allreduce(x)
                assert np.all(x == i * rank.size)
    gf.barrier()
    gf.shutdown()
    rank.report("done")


def fork_alone(rank: Rank) -> None:
    """A forked child makes a communicator of its own, while the parent's goes on."""
    gf.init()
    gf.allreduce(np.ones(5))
    child = os.fork()
    if child == 0:
        with gf.init(rank=0, size=1) as alone:
            x = gf.empty(10)
            x[:] = 2
            ok = alone.allreduce(x)[0] == 2 and alone.size == 1
        os._exit(7 if ok else 8)
    x = np.ones(100_000)
    gf.allreduce(x)
    _, status = os.waitpid(child, 0)
    gf.allreduce(x)
    rank.report("child", status=os.waitstatus_to_exitcode(status), value=float(x[-1]))
    gf.barrier()
    gf.shutdown()
