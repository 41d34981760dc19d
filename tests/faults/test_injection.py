"""A transport that is busy costs time only; one that fails breaks the communicator everywhere, naming the rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fault_world import World

from gfkernels.transport.table import Fault

pytestmark = pytest.mark.faults
WAYS = ["auto", pytest.param("tcp", marks=pytest.mark.slow)]


@pytest.mark.parametrize("way", WAYS)
def test_a_busy_transport_is_asked_again(start: Callable[..., World], way: str) -> None:
    world = start("fault_calls:inject", "busy", 1, transport=way, timeout_s=30)
    for one in world.reports():
        assert one["error"] is None, one
    counted = world.reports("counted")[1]
    assert counted["injected"] > 10 and counted["calls"] > counted["injected"], "the fault was not hit"
    world.tell("end")
    world.end()


@pytest.mark.parametrize("fault", [Fault.PROTOCOL, pytest.param(Fault.PEER_LOST, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_a_fault_breaks_the_communicator_everywhere(start: Callable[..., World], way: str, fault: Fault) -> None:
    world = start("fault_calls:inject", str(int(fault)), 1, transport=way, timeout_s=30)
    found = world.reports()
    assert world.report(1, "counted")["injected"] > 0, "the fault was not hit"
    assert all("TransportError" in one["kinds"] for one in found), found
    for rank in world.others(1):
        assert "rank 1" in found[rank]["message"], found
    world.tell("end")
    world.end()
