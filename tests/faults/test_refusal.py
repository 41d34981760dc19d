"""A call that a rank refuses itself is heard by those that wait for it, and the communicator goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fault_calls import ODD
from fault_world import NOTICED_S, World

pytestmark = pytest.mark.faults
TIMES = 5


@pytest.mark.parametrize("way", ["auto", pytest.param("shm", marks=pytest.mark.slow)])
def test_waiting_peers_hear_of_it(start: Callable[..., World], way: str) -> None:
    world = start("fault_calls:refuse", "late", transport=way, timeout_s=20)
    world.reports("ready")
    for _ in range(TIMES):
        world.reports("entering", world.others(ODD))
        time.sleep(0.4)
        world.tell("refuse", [ODD])
        own = world.report(ODD)
        assert own["error"] == "UsageError" and "read-only" in own["message"]
        for rank in world.others(ODD):
            one = world.report(rank)
            assert "UsageError" in one["kinds"] and one["picklable"], one
            assert f"rank {ODD}" in one["message"] and "read-only" in one["message"], one
            assert one["at"] - own["at"] < NOTICED_S, one
    world.reports("went on")
    world.end()


def test_nobody_was_waiting(start: Callable[..., World]) -> None:
    world = start("fault_calls:refuse", "early", timeout_s=20)
    world.reports("ready")
    for _ in range(TIMES):
        assert world.report(ODD)["error"] == "UsageError"
        world.report(ODD, "refused")
        time.sleep(0.05)  # who comes within a millisecond counts as waiting
        world.tell("come", world.others(ODD))
    world.reports("went on")
    world.end()


@pytest.mark.parametrize("way", ["auto", pytest.param("shm", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_all_refuse(start: Callable[..., World], way: str) -> None:
    world = start("fault_calls:refuse", "all", transport=way, timeout_s=20)
    for _ in range(TIMES):
        assert [one["error"] for one in world.reports()] == ["UsageError"] * 3
    world.reports("went on")
    world.end()
