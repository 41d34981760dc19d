"""Ctrl-C ends a call at once on the rank that gets it, and the others hear who was interrupted."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import pytest
from fault_world import NOTICED_S, World

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("way", "call"),
    [
        ("auto", "call"),
        ("auto", "large"),
        *(
            pytest.param(way, call, marks=pytest.mark.slow)
            for way, call in [
                ("auto", "handle"),
                ("auto", "wait"),
                ("tcp", "call"),
                ("tcp", "large"),
                ("tcp", "handle"),
                ("tcp", "wait"),
                ("cma", "large"),
                ("shm", "large"),
            ]
        ),
    ],
)
def test_ctrl_c(start: Callable[..., World], chance: random.Random, way: str, call: str) -> None:
    victim = chance.randrange(3)
    absent = (victim + chance.choice([1, 2])) % 3
    print(f"rank {victim} is interrupted; rank {absent} is absent")
    world = start("fault_stop:interrupted", call, victim, absent, transport=way, timeout_s=30)
    world.reports("ready")
    time.sleep(chance.uniform(0.1, 0.5))
    interrupted_at = world.hurt(victim, signal.SIGINT)
    one = world.report(victim)
    assert one["error"] == "KeyboardInterrupt", one
    assert one["at"] - interrupted_at < NOTICED_S, one
    unaware = set()
    for rank in world.others(victim):
        if rank == absent and call != "large":
            world.tell("come", [rank])
        peer = world.report(rank)
        if way == "tcp" and call != "large" and peer["error"] is None:
            # All that it needed was on its way before it heard who gave up: its next call tells.
            unaware.add(rank)
            continue
        assert "TransportError" in peer["kinds"] or peer["error"] == "CommunicatorBroken", peer
        assert f"rank {victim}" in peer["message"], peer
        if rank != absent:
            assert peer["at"] - interrupted_at < NOTICED_S, peer
    for rank in world.others(victim):
        after = world.report(rank, "after")
        if rank in unaware:
            assert "TransportError" in after["kinds"] and f"rank {victim}" in after["message"], after
        else:
            assert after["error"] == "CommunicatorBroken", after
    world.end()
