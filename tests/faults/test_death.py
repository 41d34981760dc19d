"""A rank is killed at a random moment; every other one hears of it in time, and nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from fault_world import NOTICED_S, World, members, until

pytestmark = pytest.mark.faults
KEPT = {"fds": 1, "threads": 0, "memfds": 1}
"""What a process may keep after shutdown: its own arena, for the next communicator."""


def check_survivors(world: World, victim: int, killed_at: float) -> None:
    """All raise the same in time, are refused from then on, and give everything back."""
    assert world.status(victim) == -signal.SIGKILL, "the fault was not hit"
    for rank in world.others(victim):
        one = world.report(rank)
        assert one["error"] == "PeerLostError" and one["rank"] == victim and one["picklable"], one
        assert f"rank {victim}" in one["message"]
        assert one["at"] - killed_at < NOTICED_S, one
        for _ in range(2):
            after = world.report(rank, "after")
            assert after["error"] == "CommunicatorBroken" and after["seconds"] < 0.5, after
        leaks = world.report(rank, "resources")
        for name, kept in KEPT.items():
            assert leaks["after"][name] <= leaks["before"][name] + kept, leaks
    world.end({victim: -signal.SIGKILL})


CASES = [
    pytest.param(way, moment, victim, child, marks=() if quick else pytest.mark.slow)
    for way, moment, victim, child, quick in [
        ("auto", "inside", 1, False, True),
        ("tcp", "large", 0, False, True),
        ("auto", "large", 0, True, True),
        *(("auto", moment, victim, False, False) for moment in ("between", "large") for victim in (0, 2)),
        *(("tcp", moment, victim, False, False) for moment in ("inside", "between", "large") for victim in (0, 2)),
        *((way, "large", 2, False, False) for way in ("cma", "shm")),
        *((way, "inside", 0, True, False) for way in ("auto", "tcp", "cma", "shm")),
        ("tcp", "large", 1, True, False),
    ]
]


@pytest.mark.parametrize(("way", "moment", "victim", "child"), CASES)
def test_a_killed_rank_is_noticed(
    start: Callable[..., World], chance: random.Random, way: str, moment: str, victim: int, child: bool
) -> None:
    world = start("fault_death:loop", moment, victim, child, transport=way, timeout_s=30)
    world.reports("ready")
    if moment == "between":
        world.report(victim, "between")
    time.sleep(chance.uniform(0.0, 0.4))
    killed_at = world.hurt(victim, signal.SIGKILL)
    try:
        check_survivors(world, victim, killed_at)
    finally:
        if child:
            pid = world.report(victim, "child")["pid"]
            assert pid in members(world.pids[victim]), "the fault was not hit: the child had ended"
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            until(lambda: pid not in members(world.pids[victim]), f"the forked child {pid} does not end")
