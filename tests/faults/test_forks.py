"""Processes forked from a rank: they may not call, may start alone, and disturb nobody when they end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fault_world import World

pytestmark = pytest.mark.faults
WAYS = ["auto", pytest.param("tcp", marks=pytest.mark.slow)]


@pytest.mark.parametrize("way", WAYS)
def test_a_childs_call_is_refused(start: Callable[..., World], way: str) -> None:
    world = start("fault_life:fork", transport=way, timeout_s=30)
    for _ in range(2):
        assert [one["status"] for one in world.reports("child")] == [43] * 3
    world.end()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_a_pool_of_processes_alongside(start: Callable[..., World], way: str) -> None:
    world = start("fault_life:pool", transport=way, timeout_s=30)
    world.reports("done")
    world.end()


@pytest.mark.parametrize("way", WAYS)
def test_a_child_may_start_alone(start: Callable[..., World], way: str) -> None:
    world = start("fault_life:fork_alone", transport=way, timeout_s=30)
    assert [(one["status"], one["value"]) for one in world.reports("child")] == [(7, 9.0)] * 3
    world.end()
