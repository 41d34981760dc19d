"""The phases of a call: a variant that has to be built first, calls of the queue, faults of a table's functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_compare import compare, inputs, numbers_of
from engine_parts import Guarded, Numbers, Program
from engine_world import World
from framed_mesh import FramedMesh
from meshes import tcp_mesh
from plan_families import FAMILIES

from gfkernels.engine.context import Code, Ctx, Kind, Owner, Phase, Prog
from gfkernels.transport.table import Fault, Slot
from gfkernels.types import DTYPES

REGISTERED, STAGED = "direct-registered-allreduce-packed0-out0", "direct-staged-allreduce-packed0-out0"
RING = "ring-allreduce-packed0-out0-landing0-enter0"


def arrays(size: int, count: int) -> list[Guarded]:
    """An array of ones for every rank."""
    given = [Guarded(4 * count) for _ in range(size)]
    for array in given:
        array.bytes[:] = np.ones(count, np.float32).view(np.uint8)
    return given


def values(array: Guarded) -> list[float]:
    return [float(value) for value in array.bytes.view(np.float32)]


def test_a_variant_is_built_when_its_kind_comes_up() -> None:
    """One rank's array is out of reach, so all need the staged plan, which nobody has yet."""
    size, count = 3, 20
    world = World(size)
    world.words[2, Ctx.ARENA_NBYTES] = 0
    mapped, staged = FAMILIES[REGISTERED](size, count, 8), FAMILIES[STAGED](size, count, 8)
    programs = [world.program(plan, Numbers(), signature=5, kinds=[Kind.REGISTERED]) for plan in mapped]
    given = arrays(size, count)
    codes = [world.call(r, programs[r], given[r].address) for r in range(size)]
    assert codes == [Code.SLICE, Code.SLICE, Code.NEED_PLAN]
    assert world.words[2, Ctx.KIND] == Kind.STAGED
    assert world.words[2, Ctx.PHASE] == Phase.ENTER
    # Asked again before it is built, it answers the same; nothing has been done.
    assert world.resume(2) is Code.NEED_PLAN
    assert all(values(array) == [1.0] * count for array in given)
    for rank in range(size):
        if rank != 2:
            assert world.resume(rank) is Code.NEED_PLAN
        programs[rank].install(Kind.STAGED, staged[rank])
    for _ in range(50):
        for rank in range(size):
            if world.words[rank, Ctx.PHASE] != Phase.IDLE:
                world.resume(rank)
    assert all(values(array) == [3.0] * count for array in given)
    assert not world.words[:, Ctx.PHASE].any()
    # The next call finds it there.
    codes = [world.call(r, programs[r], given[r].address) for r in range(size)]
    assert Code.NEED_PLAN not in codes


def test_scratch_that_grew_while_a_variant_was_built_is_used() -> None:
    size, count = 2, 30
    world = World(size, kind=Kind.CMA)
    plans = FAMILIES["direct-cma-allreduce-packed0-out0"](size, count, 8)
    programs = [world.program(plan, Numbers(), signature=5, kinds=[Kind.REGISTERED]) for plan in plans]
    given, larger = arrays(size, count), [Guarded(4096) for _ in range(size)]
    first = [world.call(r, programs[r], given[r].address) for r in range(size)]
    assert first == [Code.SLICE, Code.NEED_PLAN]
    assert world.resume(0) is Code.NEED_PLAN
    for rank in range(size):
        programs[rank].words[Prog.SCRATCH] = larger[rank].address
        programs[rank].install(Kind.CMA)
    for _ in range(20):
        for rank in range(size):
            if world.words[rank, Ctx.PHASE] != Phase.IDLE:
                world.resume(rank)
    assert all(values(array) == [2.0] * count for array in given)
    assert all((scratch.bytes == 0xA5).all() for scratch in world.scratch), "the old scratch was used"
    for array in larger:
        array.check("the new scratch")


def test_calls_of_the_queue_hold_the_engine() -> None:
    size, count = 2, 9
    world = World(size)
    plans = FAMILIES[REGISTERED](size, count, 8)
    programs = [world.program(plan, Numbers()) for plan in plans]
    given, engine = arrays(size, count), world.engine
    assert engine.acquire(world.ctx(0), Owner.QUEUE) == 1
    assert engine.acquire(world.ctx(0), Owner.QUEUE) == 0
    assert Code(engine.call_queued(world.ctx(0), programs[0].address, given[0].address, 0)) is Code.SLICE
    assert world.call(0, programs[0], given[0].address) is Code.BUSY
    assert world.words[0, Ctx.SEQUENCE] == 1, "a call that was refused used up a number"
    assert world.call(1, programs[1], given[1].address) is Code.SLICE
    assert world.resume(0) is Code.DONE
    assert world.words[0, Ctx.LOCK] == Owner.NOBODY
    assert world.resume(1) is Code.DONE
    engine.acquire(world.ctx(0), Owner.CALLER)
    engine.release(world.ctx(0))
    assert world.words[0, Ctx.LOCK] == Owner.NOBODY


def test_arrays_of_no_elements_are_registered() -> None:
    """They have no place, so they must not pull the others' kind down."""
    world = World(2, kind=Kind.CMA)
    plans = FAMILIES[REGISTERED](2, 0, 8)
    programs = [world.program(plan, Numbers()) for plan in plans]
    assert world.call(0, programs[0], 0) is Code.SLICE
    assert world.words[0, Ctx.OWN_KIND] == Kind.REGISTERED


@pytest.mark.parametrize("slot", [Slot.PUT, Slot.POLL, Slot.PROGRESS, Slot.BEGIN, Slot.FLUSH])
def test_a_fault_of_any_function_ends_the_call(slot: Slot) -> None:
    """It is told as FAULT, with the peer whose row of the table failed, and nothing after it runs."""
    size, count, bad = 3, 24, 2
    mesh = FramedMesh(size, seed=3)
    world = World(size, ends=mesh.ends)
    plans = FAMILIES["barrier-enter0" if slot == Slot.FLUSH else RING](size, count, 4)
    programs = [world.program(plan, Numbers()) for plan in plans]
    faulty = _faulty(mesh, slot)
    # A ring puts to the next rank and polls both neighbours; rank 1's next is rank 2.
    world.ends[1].table[bad, slot] = ctypes.cast(faulty, ctypes.c_void_p).value or 0
    given = arrays(size, count)
    codes = [world.call(r, programs[r], given[r].address) for r in range(size)]
    for _ in range(400):
        for rank in range(size):
            if codes[rank] is Code.SLICE:
                codes[rank] = world.resume(rank)
    assert codes[1] is Code.FAULT
    assert world.words[1, Ctx.FAULT] == Fault.SYSTEM
    assert world.words[1, Ctx.PEER] == bad
    # The engine stays with the caller until he lets it go.
    assert world.words[1, Ctx.LOCK] == Owner.CALLER
    assert world.words[1, Ctx.N_CALLS] == 0


def _faulty(mesh: FramedMesh, slot: Slot) -> Any:
    prototype = type(mesh.callbacks[slot])
    fail: Callable[..., int] = lambda *_: -int(Fault.SYSTEM)  # noqa: E731
    faulty = prototype(fail)
    mesh.callbacks[Slot.GET] = faulty  # kept alive
    return faulty


def test_a_fault_of_get_names_the_peer() -> None:
    size, count = 3, 40
    world = World(size, kind=Kind.CMA)
    plans = FAMILIES["direct-cma-allreduce-packed0-out0"](size, count, 8)
    programs = [world.program(plan, Numbers()) for plan in plans]
    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_int64,) * 5)
    lost = prototype(lambda *_: -int(Fault.PEER_LOST))
    world.ends[0].table[2, Slot.GET] = ctypes.cast(lost, ctypes.c_void_p).value or 0
    given = arrays(size, count)
    for rank in (1, 2):
        assert world.call(rank, programs[rank], given[rank].address) is Code.SLICE
    assert world.call(0, programs[0], given[0].address) is Code.FAULT
    assert (world.words[0, Ctx.FAULT], world.words[0, Ctx.PEER]) == (Fault.PEER_LOST, 2)


def test_a_mismatch_leaves_the_arrays_alone() -> None:
    world = World(3)
    plans = FAMILIES[REGISTERED](3, 12, 8)
    programs: list[Program] = [world.program(p, Numbers(), signature=7 + (p.rank == 1)) for p in plans]
    given = arrays(3, 12)
    assert world.call(0, programs[0], given[0].address) is Code.SLICE
    assert world.call(1, programs[1], given[1].address) is Code.MISMATCH
    assert world.call(2, programs[2], given[2].address) is Code.MISMATCH
    assert world.resume(0) is Code.MISMATCH
    assert [int(world.words[r, Ctx.PEER]) for r in range(3)] == [1, 0, 1]
    assert all(values(array) == [1.0] * 12 for array in given)


OVER_TCP = [
    "ring-allreduce-packed1-out0-landing0-enter0",
    "doubling-packed0-out1-enter0",
    "ring-allgather-packed0-landing1-enter0",
    "ring-broadcast-landing1-enter0",
]


@pytest.mark.parametrize("name", OVER_TCP)
def test_over_tcp(name: str) -> None:
    """The engine over real sockets, in turns and in threads, against the slow executor."""
    ends = tcp_mesh(3)
    try:
        world = World(3, ends=list(ends))
        plans = FAMILIES[name](3, 301, 32)
        compare(world, [plans] * 3, numbers_of(name), seed=1)
        compare(world, [plans] * 20, numbers_of(name), seed=2, threads=True)
    finally:
        for end in ends:
            end.close(leave=False)


def test_the_fast_path_gives_the_same_bytes() -> None:
    """`call_array` reads the array's object; `call` is told its address."""
    size, count = 2, 17
    world = World(size)
    plans = FAMILIES[REGISTERED](size, count, 8)
    programs = [world.program(plan, Numbers(DTYPES["float32"])) for plan in plans]
    given = [one[0] for one in inputs(3, [plans], Numbers())[0]]
    want = given[0] + given[1]
    codes = [Code(world.engine.call_array(world.ctx(r), programs[r].address, id(given[r]))) for r in range(size)]
    assert codes == [Code.SLICE, Code.SLICE]
    assert world.resume(0) is Code.DONE
    assert world.resume(1) is Code.DONE
    assert all(x.tobytes() == want.tobytes() for x in given)
