"""Every wait and signal of a plan is needed: without it the checker finds a fault, or proves that none can happen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_families import FAMILIES

from gfkernels.plan.check import PlanError, check, check_sequence
from gfkernels.plan.model import Plan
from gfkernels.types import StepOp


def without(plan: Plan, row: int) -> Plan:
    """The plan less one row."""
    starts = plan.lane_starts - (plan.lane_starts > row)
    starts = np.concatenate([starts[:1], starts[1:][np.diff(starts) > 0]])
    return replace(plan, steps=np.delete(plan.steps, row), lane_starts=starts, n_pre=plan.n_pre - int(row < plan.n_pre))


def survivors(plans: list[Plan], rank: int) -> list[int]:
    """Waits of one rank that the checker proves redundant."""
    plan, alive = plans[rank], []
    for row in np.flatnonzero(plan.steps["op"] == StepOp.WAIT).tolist():
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


@pytest.mark.parametrize("name", SIGNALLING)
def test_every_wait_is_needed(name: str) -> None:
    plans = FAMILIES[name](3, 40, 16)
    check(plans)
    waits = np.flatnonzero(plans[0].steps["op"] == StepOp.WAIT).tolist()
    alive = survivors(plans, 0)
    for row in alive:
        step = plans[0].steps[row]
        # A credit may be implied by the data that follows it round the ring, or by ENTER. Data may not.
        assert step["channel"] % 2 == 1 or _is_repeated(plans[0], row), f"row {row} of {name}: {step}"
    assert not waits or len(alive) < len(waits)


@pytest.mark.parametrize("name", SIGNALLING)
def test_every_signal_is_accounted_for(name: str) -> None:
    plans = FAMILIES[name](3, 40, 16)
    plan = plans[1]
    for row in np.flatnonzero(plan.steps["op"] == StepOp.SIGNAL).tolist():
        mutant = list(plans)
        mutant[1] = without(plan, row)
        with pytest.raises(PlanError, match="expects"):
            check(mutant)


@pytest.mark.parametrize(
    "name",
    ["direct-registered-allreduce-packed0-out0", "direct-cma-allreduce-packed0-out0", "many-registered-packed0"]
    + ["direct-staged-allreduce-packed1-out0", "direct-registered-allgather-packed0"],
)
def test_direct_plans_have_no_redundant_wait(name: str) -> None:
    plans = FAMILIES[name](3, 40, 16)
    for rank in range(3):
        assert survivors(plans, rank) == []


def test_first_credit_wait_of_a_ring_protects_the_previous_call() -> None:
    """Value 0 looks idle; it keeps a fast rank's next call out of slots that its neighbour still reads."""
    plans = FAMILIES["ring-allreduce-packed0-out0-landing0-enter0"](3, 40, 16)
    first = [
        row
        for row, step in enumerate(plans[0].steps)
        if step["op"] == StepOp.WAIT and step["channel"] % 2 == 1 and step["value"] == 0
    ]
    assert len(first) == plans[0].n_lanes
    assert not set(first) & set(survivors(plans, 0))
    mutant = list(plans)
    mutant[0] = without(plans[0], first[0])
    check_sequence([mutant])  # a single call does not need it
    with pytest.raises(PlanError, match="call 1"):
        check_sequence([mutant] * 2)
