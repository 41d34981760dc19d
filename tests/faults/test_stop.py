"""Ranks are stopped and go on: waits end in time, memory stays its owner's, and short stops harm nobody."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import pytest
from fault_world import World

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    ("way", "memory"),
    [
        ("auto", "registered"),
        *(
            pytest.param(way, memory, marks=pytest.mark.slow)
            for way, memory in [
                ("auto", "ordinary"),
                ("cma", "ordinary"),
                ("shm", "ordinary"),
                ("tcp", "ordinary"),
                ("tcp", "registered"),
            ]
        ),
    ],
)
def test_a_stopped_rank_writes_into_nobodys_memory(
    start: Callable[..., World], chance: random.Random, way: str, memory: str
) -> None:
    victim = chance.randrange(3)
    world = start("fault_stop:reuse", memory, victim, transport=way, timeout_s=1)
    world.reports("ready")
    time.sleep(chance.uniform(0.0, 0.3))
    world.stop(victim)
    for one in world.reports("call", world.others(victim)):
        assert "WaitTimeout" in one["kinds"], one
        assert f"rank {victim}" in one["message"], one
    world.reports("reused", world.others(victim))
    assert world.state(victim) == "T", "the fault was not hit"
    world.hurt(victim, signal.SIGCONT)
    assert world.report(victim)["error"] is not None
    time.sleep(0.3)
    world.tell("check", world.others(victim))
    for one in world.reports("untouched", world.others(victim)):
        assert all(one["clean"]), one
    for one in world.reports("after"):
        assert one["error"] == "CommunicatorBroken"
    world.end()


@pytest.mark.parametrize("way", ["auto", "tcp"])
@pytest.mark.slow
def test_a_short_stop_is_harmless(start: Callable[..., World], chance: random.Random, way: str) -> None:
    world = start("fault_stop:steps", transport=way, timeout_s=30)
    world.reports("ready")
    for _ in range(2):
        victim = chance.randrange(3)
        time.sleep(chance.uniform(0.0, 0.3))
        world.stop(victim)
        time.sleep(0.4)
        assert world.state(victim) == "T", "the fault was not hit"
        world.hurt(victim, signal.SIGCONT)
    world.reports("done")
    world.end()


@pytest.mark.parametrize("way", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_suspended_waiter_has_not_timed_out(start: Callable[..., World], way: str) -> None:
    timeout_s = 3.0
    world = start("fault_stop:late", transport=way, timeout_s=timeout_s)
    world.reports("ready")
    time.sleep(0.2)
    for rank in (0, 2):
        world.stop(rank)
    time.sleep(timeout_s + 0.5)
    assert world.state(0) == world.state(2) == "T", "the fault was not hit"
    for rank in (0, 2):
        world.hurt(rank, signal.SIGCONT)
    world.tell("come", [1])
    for one in world.reports():
        assert one["error"] is None, one
    assert [one["value"] for one in world.reports("sum")] == [3, 3, 3]
    world.end()


@pytest.mark.parametrize("way", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_is_named(start: Callable[..., World], way: str) -> None:
    world = start("fault_stop:late", transport=way, timeout_s=0.7)
    world.reports("ready")
    late = world.reports("call", [0, 2])
    for one in late:
        assert one["error"] == "WaitTimeout" and "waited 0.7 s for rank 1" in one["message"], late
        assert 0.6 < one["seconds"] < 4.0
    world.tell("come", [1])
    error, value = world.report(1)["error"], world.report(1, "sum")["value"]
    # Over TCP all that the late rank needs may have reached its sockets before the others gave up.
    assert error in ("WaitTimeout", "CommunicatorBroken") or (way == "tcp" and error is None and value == 3)
    assert world.report(1, "after")["error"] is not None
    world.end()
