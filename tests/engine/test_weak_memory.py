"""The engine's sources on a weakly ordered machine: right in every interleaving, and wrong less any ordering it has.

x86 orders stores by itself, so there a missing acquire or release goes unnoticed. Here it does not.
"""

from __future__ import annotations

import numpy as np
import pytest
from changed_sources import Changes
from engine_compare import kind_of, numbers_of
from engine_parts import Guarded, Numbers
from engine_world import Ended, Stuck, World
from plan_families import FAMILIES
from weak_memory import WeakMemory, WeakWorld, weak_inputs
from weak_mutants import INLINE, LOCK_MUTANTS, MUTANTS, REGISTERED, RING, STAGED

from gfkernels.engine.context import Ctx
from gfkernels.plan.execute import Machine
from gfkernels.plan.model import PlanBuilder
from gfkernels.types import Buffer

WITH_ENTER = [name for name in FAMILIES if "enter0" not in name]
_SEEDS = 60
"""Interleavings that a mutant may survive before it counts as alive; most die in one of the first three."""


def trial(name: str, seed: int, changes: Changes | None = None, *, size: int = 3, count: int = 9, n: int = 4) -> None:
    """Some calls in a row in one interleaving; fails where a result is not what the plan computes."""
    numbers = numbers_of(name)
    calls = [FAMILIES[name](size, count, 4)] * n
    given = weak_inputs(seed, calls, numbers)
    machine = Machine(size, numbers.dtype, op=numbers.op, wire=numbers.wire)
    want = [machine.run(plans, arrays) for plans, arrays in zip(calls, given, strict=True)]
    streamed = seed % 2 == 1
    world = WeakWorld(size, seed, changes=changes, kind=kind_of(name), numbers=numbers, streamed=streamed)
    got = world.run_weakly(calls, given)
    for call in range(n):
        for rank in range(size):
            for a, b in zip(got[call][rank], want[call][rank], strict=True):
                assert a.tobytes() == b.tobytes(), f"seed {seed}, call {call}, rank {rank}: {a} is not {b}"


def killed_by(name: str, changes: Changes) -> int | None:
    """The first seed whose interleaving shows that something is wrong, None if there is none."""
    WeakWorld(2, 0, changes=changes)  # a change that does not fit is no kill
    for seed in range(_SEEDS):
        try:
            trial(name, seed, changes)
        except (AssertionError, Stuck, Ended):
            return seed
    return None


@pytest.mark.parametrize("name", WITH_ENTER)
@pytest.mark.slow
def test_every_family_is_ordered(name: str) -> None:
    for seed in range(2):
        trial(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", [INLINE, REGISTERED, STAGED, RING])
def test_many_interleavings(name: str) -> None:
    for seed in range(100, 125):
        trial(name, seed, n=6)


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name: str) -> None:
    mutant = MUTANTS[name]
    for family in mutant.families:
        seed = killed_by(family, {mutant.module: mutant.changes})
        assert seed is not None, f"{name!r} survives {_SEEDS} interleavings of {family}: {mutant.breaks}"


# -- the machine itself can tell ---------------------------------------------------------------------------------


def _message_passing(seed: int, *, release: bool, acquire: bool) -> int:
    """What a reader finds in a box once its flag is up; 7 was put there."""
    memory, words, found = WeakMemory(2, seed), np.zeros(2, np.int64), [-1]
    at = int(words.ctypes.data)
    memory.share(at, 16)
    parts = memory.stand_ins()["gfkernels.native.memory"]

    def write() -> None:
        parts.store64(at, 7)
        (parts.store_release if release else parts.store64)(at + 8, 1)

    def read() -> None:
        while (parts.load_acquire if acquire else parts.load64)(at + 8) == 0:
            memory.idle()
        found[0] = parts.load64(at)

    memory.run([write, read])
    return found[0]


def test_message_passing_needs_both_halves() -> None:
    def seen(release: bool, acquire: bool) -> set[int]:
        return {_message_passing(seed, release=release, acquire=acquire) for seed in range(60)}

    assert seen(True, True) == {7}
    assert seen(False, True) == seen(True, False) == {0, 7}


def _two_callers(seed: int, changes: Changes | None) -> None:
    """Two threads take turns inside one rank's engine; each leaves its mark, and the counters count both."""
    world = WeakWorld(1, seed, changes=changes, n_threads=2)
    builder = PlanBuilder("test", "allreduce", 0, 1, 2, out=True)
    builder.enter()
    builder.copy(builder.own(Buffer.X, 0, 2), builder.own(Buffer.OUT, 0, 2))
    program = world.program(builder.build(), Numbers())
    world.memory.share(world.ctx(0), world.words[0].nbytes)
    first, second = (Guarded(8), Guarded(8)), (Guarded(8), Guarded(8))

    def work(x: Guarded, out: Guarded, mark: int) -> None:
        world.adopt(x)
        world.adopt(out)
        world.write(x, bytes([mark]) * 8)
        for _ in range(3):
            # BUSY: the other one is inside.
            while int(world.engine.call(world.ctx(0), program.address, x.address, out.address)) != 0:
                world.memory.idle()
            assert world.read(out) == bytes([mark]) * 8, "a call went to another caller's array"
            world.write(out, bytes(8))

    world.memory.run([lambda: work(first[0], first[1], 1), lambda: work(second[0], second[1], 2)])
    assert world.words[0, Ctx.SEQUENCE] == world.words[0, Ctx.N_CALLS] == 6


def test_one_engine_for_two_threads() -> None:
    for seed in range(40):
        _two_callers(seed, None)


@pytest.mark.mutants
@pytest.mark.parametrize("name", LOCK_MUTANTS)
def test_mutants_of_the_lock_are_killed(name: str) -> None:
    changes = {"gfkernels.engine.executor": [LOCK_MUTANTS[name][:2]]}
    WeakWorld(1, 0, changes=changes)
    for seed in range(_SEEDS):
        try:
            _two_callers(seed, changes)
        except AssertionError:
            return
    pytest.fail(f"{name!r} survives {_SEEDS} interleavings")


def test_changes_that_do_not_fit_are_errors() -> None:
    with pytest.raises(AssertionError, match="stands there 0 times"):
        WeakWorld(2, 0, changes={"gfkernels.engine.rows": [("no such text", "")]})
    with pytest.raises(AssertionError, match="not copied"):
        WeakWorld(2, 0, changes={"gfkernels.config": [("x", "y")]})
    assert isinstance(WeakWorld(2, 0), World)
