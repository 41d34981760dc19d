"""Ranks end in every way there is: those who need them hear of it, those who do not are left alone; then all again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fault_world import NOTICED_S, World

from gfkernels.communicator.failure import Failure

pytestmark = pytest.mark.faults
STATUS = {"exit": 3, "crash": 1, "_exit": 5}
QUICK = {("auto", "crash"), ("tcp", "_exit"), ("auto", "abort")}


@pytest.mark.parametrize(
    ("way", "how"),
    [
        pytest.param(way, how, marks=() if (way, how) in QUICK else pytest.mark.slow)
        for way in ("auto", "tcp")
        for how in ("shutdown", "exit", "crash", "_exit", "abort")
    ],
)
def test_a_rank_that_ends_is_missed(start: Callable[..., World], chance: random.Random, way: str, how: str) -> None:
    victim = chance.randrange(3)
    world = start("fault_life:end", how, victim, transport=way, timeout_s=30)
    world.reports("ready")
    time.sleep(chance.uniform(0.0, 0.2))
    world.tell("end", [victim])
    ended_at = time.monotonic()
    for rank in world.others(victim):
        one = world.report(rank)
        assert f"rank {victim}" in one["message"] and one["picklable"], one
        if how == "abort":
            assert "TransportError" in one["kinds"] and "enough of this" in one["message"], one
        else:
            assert one["error"] == "PeerLostError" and one["rank"] == victim, one
        if how in ("shutdown", "exit"):
            assert "left" in one["message"], one
        assert one["at"] - ended_at < NOTICED_S, one
        assert world.report(rank, "after")["error"] == "CommunicatorBroken"
    if how == "abort":
        assert world.report(victim, "after")["error"] == "CommunicatorBroken"
    world.end({victim: STATUS.get(how, 0)})
    assert ("boom" in world.log(victim)) == (how == "crash")


def test_who_died_is_named_before_who_left_because_of_it() -> None:
    events: Any = SimpleNamespace(gone={10: "left", 11: "", 12: "its process ended", 13: ""}.__getitem__)
    core: Any = SimpleNamespace(rank=1, size=4, members=(10, 11, 12, 13), site=SimpleNamespace(events=events))
    failure = Failure(core)
    assert failure.gone() == [(2, "its process ended"), (0, "left")]
    failure.closed |= {1, 3}
    assert failure.gone() == [(2, "its process ended"), (0, "left"), (3, "left")]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_leaving_after_the_last_call_disturbs_nobody(
    start: Callable[..., World], chance: random.Random, way: str
) -> None:
    world = start("fault_life:leave_early", 25, chance.randrange(1 << 20), transport=way, timeout_s=30)
    assert [one["times"] for one in world.reports("done")] == [100] * 3
    world.end()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_starting_again_leaves_nothing_behind(start: Callable[..., World], way: str) -> None:
    times, settled = 20, 5
    world = start("fault_life:cycles", times, transport=way, timeout_s=30)
    for one in world.reports("counts"):
        counts = one["counts"]
        assert len(counts) == times
        for name in ("fds", "threads", "memfds"):
            assert counts[-1][name] <= counts[settled][name], (name, [count[name] for count in counts])
    world.end()
