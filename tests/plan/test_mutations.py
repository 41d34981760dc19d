"""Every wait, signal and ENTER of a plan is needed: the checker refuses each named mutant that lacks one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from plan_families import FAMILIES

from gfkernels.plan.check import PlanError, check, check_sequence
from gfkernels.plan.model import Plan
from gfkernels.types import StepOp

REGISTERED = "direct-registered-allreduce-packed0-out0"
CMA = "direct-cma-allreduce-packed0-out0"
STAGED = "direct-staged-allreduce-packed1-out0"
INLINE = "direct-inline-allreduce-packed0-out0"
RING = "ring-allreduce-packed0-out0-landing0-enter0"
LANDING = "ring-allreduce-packed0-out0-landing1-enter0"
DOUBLING = "doubling-packed0-out0-enter0"
DATA, CREDIT = 0, 1

Selector = Callable[[Plan], list[int]]


def without(plan: Plan, row: int) -> Plan:
    """The plan less one row."""
    starts = plan.lane_starts - (plan.lane_starts > row)
    starts = np.concatenate([starts[:1], starts[1:][np.diff(starts) > 0]])
    is_enter = plan.has_enter and row == plan.n_pre
    return replace(
        plan,
        steps=np.delete(plan.steps, row),
        lane_starts=starts,
        n_pre=0 if is_enter else plan.n_pre - int(row < plan.n_pre),
        has_enter=plan.has_enter and not is_enter,
    )


def muted(plan: Plan, row: int) -> Plan:
    """The plan, in which one PUT tells nobody that it came."""
    steps = plan.steps.copy()
    steps["channel"][row] = -1
    return replace(plan, steps=steps)


def _rows(op: StepOp, kind: int | None = None, *, value: int | None = None, above: int | None = None) -> Selector:
    """Rows of an operation; `kind`: on a data or a credit channel; WAITs for a value, or for more than one."""

    def select(plan: Plan) -> list[int]:
        steps = plan.steps
        chosen = steps["op"] == op
        if kind is not None:
            chosen = chosen & (steps["channel"] % 2 == kind)
        if value is not None:
            chosen = chosen & (steps["value"] == value)
        if above is not None:
            chosen = chosen & (steps["value"] > above)
        return [int(row) for row in np.flatnonzero(chosen)]

    return select


@dataclass(frozen=True)
class Mutant:
    """What is taken away.

    Attributes:
        family: of which plan.
        rows: candidates on a rank.
        which: the one that goes.
        rank: on this rank; None: on all ranks.
        edit: how it goes.
        shape: (size, count, elements of a segment).
        error: what the checker then says of the run itself.
    """

    family: str
    rows: Selector
    error: str
    which: int = 0
    rank: int | None = 0
    edit: Callable[[Plan, int], Plan] = without
    shape: tuple[int, int, int] = (3, 40, 16)

    def apply(self) -> tuple[list[Plan], list[Plan]]:
        """(whole plans, mutant)."""
        plans = FAMILIES[self.family](*self.shape)
        changed = list(plans)
        for rank in range(len(plans)) if self.rank is None else (self.rank,):
            changed[rank] = self.edit(plans[rank], self.rows(plans[rank])[self.which])
        return plans, changed


ENTER = _rows(StepOp.ENTER)
WAIT, SIGNAL = _rows(StepOp.WAIT), _rows(StepOp.SIGNAL)
FIRST_CREDIT, LATER_CREDIT = _rows(StepOp.WAIT, CREDIT, value=0), _rows(StepOp.WAIT, CREDIT, above=0)
DATA_WAIT, RETURN = _rows(StepOp.WAIT, DATA), _rows(StepOp.SIGNAL, CREDIT)
PUT = _rows(StepOp.PUT)
RACE, STARVED = r"(reads|writes) .* may be (reading|writing) it", "waits for ever"
LONG = (3, 150, 15)
"""Three chunks of ten segments: both lanes use every slot again."""

MUTANTS: dict[str, Mutant] = {
    "registered: nobody enters": Mutant(REGISTERED, ENTER, RACE + "|never written|holds", rank=None),
    "registered: leaves without waiting": Mutant(REGISTERED, WAIT, RACE + "|holds"),
    "registered: leaves without a word": Mutant(REGISTERED, SIGNAL, STARVED),
    "registered reduce_scatter: leaves while it is read": Mutant(
        "direct-registered-reduce_scatter-packed0", WAIT, RACE
    ),
    "registered allgather: leaves while it is read": Mutant("direct-registered-allgather-packed0", WAIT, RACE),
    "cma: nobody enters": Mutant(CMA, ENTER, RACE + "|never written|holds", rank=None),
    "cma: leaves without waiting": Mutant(CMA, WAIT, RACE + "|holds"),
    "cma: leaves without a word": Mutant(CMA, SIGNAL, STARVED),
    "staged: nobody enters": Mutant(STAGED, ENTER, "call 1: .*" + RACE, rank=None, shape=(3, 16, 16)),
    "staged: reduces before all have packed": Mutant(STAGED, WAIT, RACE + "|never written|holds"),
    "staged: unpacks before all have reduced": Mutant(STAGED, WAIT, RACE + "|holds", which=1),
    "staged: works a tick ahead": Mutant(STAGED, WAIT, RACE + "|never written", which=2, shape=(3, 80, 16)),
    "staged: a tick without a word": Mutant(STAGED, SIGNAL, STARVED),
    "inline: nobody enters": Mutant(INLINE, ENTER, RACE + "|never written|holds", rank=None),
    "inline: one does not enter": Mutant(INLINE, ENTER, STARVED + "|never written|" + RACE),
    "ring: first put of a call into a slot still read": Mutant(RING, FIRST_CREDIT, "call 1: .*" + RACE, shape=LONG),
    "ring: first put of lane 1 likewise": Mutant(RING, FIRST_CREDIT, "call 1: .*" + RACE, which=1, shape=LONG),
    "ring: a later put without a credit": Mutant(RING, LATER_CREDIT, RACE, shape=LONG),
    "ring: reduces what has not come": Mutant(RING, DATA_WAIT, RACE + "|never written"),
    "ring: copies the result before it has come": Mutant(RING, DATA_WAIT, RACE + "|never written|holds", which=-1),
    "ring: keeps a slot": Mutant(RING, RETURN, STARVED),
    "ring: keeps the last slot of a call": Mutant(RING, RETURN, STARVED, which=-1),
    "ring: a message that nobody hears of": Mutant(RING, PUT, STARVED, edit=muted),
    "ring into the neighbour's array: leaves before it has landed": Mutant(LANDING, DATA_WAIT, RACE, which=-1),
    "ring reduce_scatter: reduces what has not come": Mutant(
        "ring-reduce_scatter-packed0-enter0", DATA_WAIT, RACE + "|never written"
    ),
    "ring allgather: passes on what has not come": Mutant(
        "ring-allgather-packed0-landing1-enter0", DATA_WAIT, RACE + "|never written|holds"
    ),
    "ring broadcast: copies what has not come": Mutant("ring-broadcast-landing0-enter0", DATA_WAIT, RACE + "|never"),
    "ring broadcast: a put without a credit": Mutant(
        "ring-broadcast-landing0-enter0", LATER_CREDIT, RACE, rank=1, shape=(3, 80, 4)
    ),
    "ring broadcast: keeps a slot": Mutant("ring-broadcast-landing0-enter0", RETURN, STARVED),
    "doubling: a partner's slot of the last call": Mutant(DOUBLING, FIRST_CREDIT, "call 1: .*" + RACE),
    "doubling: adds what has not come": Mutant(DOUBLING, DATA_WAIT, RACE + "|never written"),
    "doubling: the lender takes what has not come": Mutant(DOUBLING, DATA_WAIT, RACE + "|never|holds", rank=2),
    "doubling: keeps a slot": Mutant(DOUBLING, RETURN, STARVED),
    "doubling: an operand that nobody hears of": Mutant(DOUBLING, PUT, STARVED, edit=muted),
    "broadcast: nobody enters": Mutant("direct-registered-broadcast", ENTER, RACE + "|never written|holds", rank=None),
    "broadcast: the root leaves while it is read": Mutant("direct-registered-broadcast", WAIT, RACE, rank=1),
    "broadcast: a reader without a word": Mutant("direct-registered-broadcast", SIGNAL, STARVED),
    "broadcast cma: the root leaves while it is read": Mutant("direct-cma-broadcast", WAIT, RACE, rank=1),
    "broadcast staged: copies before the root has": Mutant("direct-staged-broadcast", WAIT, RACE + "|never"),
    "broadcast staged: the root fills a slot still read": Mutant(
        "direct-staged-broadcast", WAIT, RACE, rank=1, shape=(3, 80, 16)
    ),
    "broadcast staged: a reader keeps a slot": Mutant("direct-staged-broadcast", SIGNAL, STARVED, shape=(3, 80, 16)),
    "broadcast staged: the root without a word": Mutant("direct-staged-broadcast", SIGNAL, STARVED, rank=1),
    "many: nobody enters": Mutant("many-registered-packed0", ENTER, RACE + "|never written|holds", rank=None),
    "many: leaves without waiting": Mutant("many-registered-packed0", WAIT, RACE + "|holds"),
    "many: leaves without a word": Mutant("many-registered-packed0", SIGNAL, STARVED),
    "many cma: leaves without waiting": Mutant("many-cma-packed0", WAIT, RACE + "|holds"),
    "barrier: does not hear of a rank": Mutant("barrier-enter0", WAIT, "leaves before"),
    "barrier: does not tell a rank": Mutant("barrier-enter0", SIGNAL, STARVED),
}


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_named_mutants_are_refused(name: str) -> None:
    mutant = MUTANTS[name]
    plans, changed = mutant.apply()
    check(plans)
    with pytest.raises(PlanError):
        check(changed)
    # Not only does the book-keeping of rows object: the run itself goes wrong.
    with pytest.raises(PlanError, match=mutant.error):
        check_sequence([changed] * 3)


def survivors(plans: list[Plan], rank: int) -> list[int]:
    """Waits of one rank that the checker proves redundant."""
    plan, alive = plans[rank], []
    for row in WAIT(plan):
        mutant = list(plans)
        mutant[rank] = without(plan, row)
        try:
            check_sequence([mutant] * 3)
        except PlanError:
            continue
        alive.append(row)
    return alive


def _is_repeated(plan: Plan, row: int) -> bool:
    """A later row of the lane waits for more on the same counter; the last value is what covers the result."""
    steps, item = plan.steps[row + 1 :], plan.steps[row]
    same = (steps["op"] == StepOp.WAIT) & (steps["lane"] == item["lane"]) & (steps["peer"] == item["peer"])
    return bool(np.any(same & (steps["channel"] == item["channel"])))


SIGNALLING = [name for name in FAMILIES if "inline" not in name and name != "barrier-enter1"]


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize("name", SIGNALLING)
def test_every_wait_is_needed(name: str) -> None:
    plans = FAMILIES[name](3, 40, 16)
    check(plans)
    waits = WAIT(plans[0])
    alive = survivors(plans, 0)
    for row in alive:
        step = plans[0].steps[row]
        # A credit may be implied by the data that follows it round the ring, or by ENTER. Data may not.
        assert step["channel"] % 2 == 1 or _is_repeated(plans[0], row), f"row {row} of {name}: {step}"
    assert not waits or len(alive) < len(waits)


@pytest.mark.slow
@pytest.mark.mutants
@pytest.mark.parametrize("name", SIGNALLING)
def test_every_signal_is_needed(name: str) -> None:
    plans = FAMILIES[name](3, 40, 16)
    for edit, rows in ((without, SIGNAL(plans[1])), (muted, PUT(plans[1]))):
        for row in rows:
            if plans[1].steps["channel"][row] < 0:
                continue
            mutant = list(plans)
            mutant[1] = edit(plans[1], row)
            with pytest.raises(PlanError, match="expects"):
                check(mutant)
            with pytest.raises(PlanError):
                check_sequence([mutant] * 3)


@pytest.mark.parametrize(
    "name", [REGISTERED, CMA, STAGED, "many-registered-packed0", "direct-registered-allgather-packed0"]
)
def test_direct_plans_have_no_redundant_wait(name: str) -> None:
    plans = FAMILIES[name](3, 40, 16)
    for rank in range(3):
        assert survivors(plans, rank) == []


def test_first_credit_wait_of_a_ring_protects_the_previous_call() -> None:
    """Value 0 looks idle; it keeps a fast rank's next call out of slots that its neighbour still reads."""
    plans = FAMILIES[RING](*LONG)
    first = FIRST_CREDIT(plans[0])
    assert len(first) == plans[0].n_lanes == 2
    for row in first:
        mutant = [without(plans[0], row), *plans[1:]]
        check_sequence([mutant])  # a single call does not need it
        with pytest.raises(PlanError, match="call 1"):
            check_sequence([mutant] * 2)
