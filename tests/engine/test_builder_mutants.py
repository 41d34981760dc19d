"""Builders of plans less one wait, signal or order: the checker refuses what they then build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builder_mutants import MUTANTS, BuilderMutant
from changed_sources import Changes, Sources
from engine_compare import kind_of, numbers_of
from engine_parts import Numbers
from engine_world import Ended, Stuck
from plan_families import FAMILIES
from weak_memory import WeakWorld, weak_inputs
from weak_mutants import LOCK_MUTANTS

from gfkernels.plan.check import PlanError, check_sequence
from gfkernels.plan.execute import Machine
from gfkernels.plan.model import Plan

_CALLS = 3


def families(changes: Changes) -> Any:
    """The families, built by changed sources."""
    return Sources(["gfkernels.plan.", "plan_families"], changes).module("plan_families").FAMILIES


def changed(mutant: BuilderMutant, family: str) -> list[Plan]:
    """The plans of all ranks as the mutant builds them."""
    changes = [(mutant.old, mutant.new), *mutant.also]
    return list(families({f"gfkernels.plan.{mutant.module}": changes})[family](*mutant.shape))


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_the_checker_refuses(name: str) -> None:
    mutant = MUTANTS[name]
    for family in mutant.families:
        check_sequence([FAMILIES[family](*mutant.shape)] * _CALLS)
        plans = changed(mutant, family)
        with pytest.raises(PlanError):
            check_sequence([plans] * _CALLS)


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_the_machine_goes_wrong(name: str) -> None:
    """What the checker refuses is not a matter of taste: some interleaving gives a wrong result, or none."""
    mutant = MUTANTS[name]
    family = mutant.families[0]
    plans, whole = changed(mutant, family), FAMILIES[family](*mutant.shape)
    numbers = numbers_of(family)
    assert _agrees(family, whole, whole, numbers, 0)
    # Most die in one of the first ten; one needs a rank that is a whole call ahead, as in one interleaving of fifty.
    assert not all(_agrees(family, plans, whole, numbers, seed) for seed in range(400)), mutant.breaks


def _agrees(family: str, plans: list[Plan], whole: list[Plan], numbers: Numbers, seed: int) -> bool:
    given = weak_inputs(seed, [whole] * _CALLS, numbers)
    machine = Machine(len(whole), numbers.dtype, op=numbers.op, wire=numbers.wire)
    want = [machine.run(whole, arrays) for arrays in given]
    # One window: what a plan lacks between calls is not to be hidden by their being elsewhere.
    world = WeakWorld(len(whole), seed, kind=kind_of(family), numbers=numbers, n_windows=1)
    try:
        got = world.run_weakly([plans] * _CALLS, given)
    except (AssertionError, Stuck, Ended):
        return False
    return all(
        a.tobytes() == b.tobytes()
        for call, expected in zip(got, want, strict=True)
        for x, y in zip(call, expected, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def test_unchanged_sources_build_the_same_plans() -> None:
    """The copy is a fair one: without changes its plans are those of the real modules."""
    copies = families({})
    assert list(copies) == list(FAMILIES)
    for name, family in FAMILIES.items():
        for mine, real in zip(copies[name](3, 40, 16), family(3, 40, 16), strict=True):
            assert mine.hash == real.hash
            assert mine.steps.tobytes() == real.steps.tobytes()
            assert mine.spans.tobytes() == real.spans.tobytes()


def test_the_document_lists_them_all() -> None:
    rows = (Path(__file__).parents[2] / "docs" / "mutants.md").read_text().splitlines()
    reasons = {name: mutant.breaks for name, mutant in MUTANTS.items()}
    reasons |= {name: mutant[2] for name, mutant in LOCK_MUTANTS.items()}
    for name, breaks in reasons.items():
        assert rows.count(f"| {name} | {breaks} |") == 1, name
