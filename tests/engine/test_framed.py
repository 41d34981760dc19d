"""Plans over a transport of callbacks that refuses, delays and remembers: nothing is lost, doubled or out of place."""

from __future__ import annotations

import numpy as np
import pytest
from engine_compare import compare, inputs, numbers_of
from engine_parts import Numbers
from engine_world import Ended, World
from framed_mesh import FramedMesh
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_families import FAMILIES

from gfkernels.engine.context import Code, Ctx
from gfkernels.plan.model import PlanBuilder
from gfkernels.transport.table import Fault
from gfkernels.types import DTYPES

# What may travel between hosts: plans whose calls have no common beginning.
FRAMED = [name for name in FAMILIES if "enter0" in name]


def settle(mesh: FramedMesh, world: World) -> None:
    """Fails where the transport's rules were broken or something was left over."""
    assert mesh.breaches == []
    assert not mesh.unsettled, f"puts that were refused and never made again: {mesh.unsettled}"
    assert mesh.in_flight() == 0, "a call was over before FLUSH had sent everything"
    for rank in range(world.size):
        assert world.words[rank, Ctx.N_CALLS] == world.words[rank, Ctx.SEQUENCE]


@pytest.mark.parametrize("name", FRAMED)
@pytest.mark.slow
def test_every_family(name: str) -> None:
    for size in (1, 2, 3, 5):
        mesh = FramedMesh(size, seed=size)
        world = World(size, ends=mesh.ends)
        compare(world, [FAMILIES[name](size, 23, 7)] * 3, numbers_of(name), seed=size)
        settle(mesh, world)
        assert mesh.refused > 0 or size == 1


@settings(max_examples=25, deadline=None)
@given(
    names=st.lists(st.sampled_from([n for n in FRAMED if "packed1" not in n]), min_size=1, max_size=4),
    size=st.integers(2, 5),
    count=st.integers(0, 24),
    segment=st.integers(4, 30),
    again=st.sampled_from([0.0, 0.3, 0.8]),
    seed=st.integers(0, 2**32),
)
def test_any_plans_in_a_row(names: list[str], size: int, count: int, segment: int, again: float, seed: int) -> None:
    mesh = FramedMesh(size, seed=seed, again=again)
    world = World(size, ends=mesh.ends)
    compare(world, [FAMILIES[name](size, count, segment) for name in names], Numbers(), seed)
    settle(mesh, world)


@pytest.mark.parametrize("name", FRAMED)
def test_every_signal_goes_out_once(name: str) -> None:
    """However often a put is refused: a peer hears exactly what its plan expects."""
    size, n_calls = 4, 3
    mesh = FramedMesh(size, seed=9, again=0.7)
    world = World(size, ends=mesh.ends)
    plans = FAMILIES[name](size, 31, 8)
    compare(world, [plans] * n_calls, numbers_of(name), seed=4)
    for plan in plans:
        for peer in range(size):
            for channel in range(plan.expects.shape[1]):
                expected = n_calls * int(plan.expects[peer, channel])
                assert mesh.accepted[peer, plan.rank, channel] == expected, (plan.rank, peer, channel)


def test_a_row_for_everyone_goes_on_where_it_stopped() -> None:
    """A signal to everyone that is refused half-way keeps its place, and its place is cleared behind it."""
    size = 5
    mesh = FramedMesh(size, seed=1, again=0.8)
    world = World(size, ends=mesh.ends)
    b = [PlanBuilder("test", "barrier", rank, size, 0) for rank in range(size)]
    for builder in b:
        builder.lane(0)
        for round_ in range(3):
            builder.signal()
            builder.wait(-1, round_ + 1)
        builder.expect(-1, 3)
    plans = [builder.build() for builder in b]
    halfway = False
    for _ in range(2):
        sessions = world.run_calls([plans], [[[np.zeros(0, np.float32)]] * size], Numbers())
        assert len(sessions) == 1
        halfway = halfway or mesh.refused > 0
    assert halfway
    assert not world.next_peers.any()
    assert all(mesh.accepted[q, p, 0] == 6 for q in range(size) for p in range(size) if p != q)
    settle(mesh, world)


def test_a_mismatch_over_frames_is_a_fault_that_names_the_peer() -> None:
    size = 2
    mesh = FramedMesh(size, again=0.0)
    world = World(size, ends=mesh.ends)
    name = "ring-allreduce-packed0-out0-landing0-enter0"
    plans = [FAMILIES[name](size, 40, 8)[0], FAMILIES[name](size, 30, 8)[1]]
    given_ = inputs(1, [plans], Numbers())
    with pytest.raises(Ended, match="FAULT"):
        world.run_calls([plans], given_, Numbers())
    faults = [(int(w[Ctx.FAULT]), int(w[Ctx.PEER])) for w in world.words]
    assert (Fault.MISMATCH, 1) in faults or (Fault.MISMATCH, 0) in faults


def test_a_call_without_peers_uses_no_transport() -> None:
    mesh = FramedMesh(1)
    world = World(1, ends=mesh.ends)
    plan = FAMILIES["ring-allreduce-packed0-out1-landing1-enter0"](1, 7, 4)[0]
    program = world.program(plan, Numbers(DTYPES["int32"]))
    x, out = np.arange(7, dtype=np.int32), np.zeros(7, np.int32)
    assert world.call(0, program, x.ctypes.data, out.ctypes.data) is Code.DONE
    assert np.array_equal(out, x)
