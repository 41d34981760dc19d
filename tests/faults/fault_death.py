"""Owns what ranks do in test_death.py."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from fault_rank import Rank, resources

import gfkernels as gf

LARGE = 3_000_000


def loop(rank: Rank, moment: str, victim: int, with_child: bool) -> None:
    """Until somebody dies: waits for the victim, calls now and then, or makes large calls one after the other."""
    before = resources()
    gf.init()
    x: Any = gf.empty(LARGE) if moment == "large" else np.ones(1000, np.float32)
    gf.barrier()
    if with_child and rank.rank == victim:
        child = os.fork()
        if child == 0:
            time.sleep(90)
            os._exit(0)
        rank.report("child", pid=child)

    def calls() -> None:
        while True:
            x[:] = 1
            gf.allreduce(x)
            assert np.all(x == rank.size), "a wrong sum"
            if moment == "between":
                rank.report("between")
                time.sleep(0.3)

    rank.report("ready")
    if moment == "inside" and rank.rank == victim:
        time.sleep(90)
    rank.fails(calls)
    rank.fails(lambda: gf.allreduce(np.ones(3)), "after")
    rank.fails(gf.barrier, "after")
    gf.shutdown()
    x = None
    rank.report("resources", before=before, after=resources())
