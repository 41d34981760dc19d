"""Which plan is chosen for what, and what a choice refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gfkernels.errors import UsageError
from gfkernels.plan.check import check
from gfkernels.plan.choose import DOUBLING_NBYTES, INLINE_NBYTES, choose, mean_prescale
from gfkernels.types import DTYPES, ReduceOp

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "barrier")


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("count", [0, 4, 4000, 400_000])
@pytest.mark.parametrize("wired", [True, False])
def test_every_choice_is_a_right_plan(collective: str, same_host: bool, count: int, wired: bool) -> None:
    for variant in ("registered", "cma", "staged"):
        choice = choose(
            collective,
            size=4,
            count=count,
            itemsize=4,
            wire_itemsize=2 if wired else None,
            wired=wired,
            same_host=same_host,
            variant=variant,
            segment_bytes=1 << 17,
        )
        plans = [choice.build(rank) for rank in range(4)]
        check(plans, calls=2)
        assert plans[0].has_enter == same_host
        assert plans[0].stage_elements * (2 if wired else 4) <= 16 << 20


@pytest.mark.parametrize(
    ("count", "same_host", "variant", "name"),
    [
        (INLINE_NBYTES // 4, True, "registered", "direct.inline"),
        (INLINE_NBYTES // 4 + 1, True, "registered", "direct.registered"),
        (1 << 20, True, "cma", "direct.cma"),
        (1 << 20, True, "staged", "direct.staged"),
        (DOUBLING_NBYTES // 4, False, "staged", "recursive_doubling"),
        (DOUBLING_NBYTES // 4 + 1, False, "staged", "ring"),
    ],
)
def test_crossovers(count: int, same_host: bool, variant: str, name: str) -> None:
    choice = choose("allreduce", size=4, count=count, itemsize=4, same_host=same_host, variant=variant)
    assert choice.build(0).name == name
    assert choice.reaches_arrays == (name in ("direct.registered", "direct.cma"))
    assert choice.build(0) is choice.build(0)
    assert "allreduce(" in choice.kind


def test_an_explicit_plan_is_used_or_refused() -> None:
    ring = choose("allreduce", size=4, count=8, itemsize=4, plan="ring")
    assert ring.build(2).name == "ring" and ring.build(2).has_enter
    doubling = choose("allreduce", size=4, count=100_000, itemsize=4, plan="recursive_doubling")
    assert doubling.build(0).name == "recursive_doubling"
    with pytest.raises(UsageError, match="staging_bytes is"):
        choose("allreduce", size=4, count=10**8, itemsize=4, plan="recursive_doubling")
    with pytest.raises(UsageError, match="one host"):
        choose("allreduce", size=4, count=8, itemsize=4, plan="direct", same_host=False)
    with pytest.raises(UsageError, match="allreduce only"):
        choose("broadcast", size=4, count=8, itemsize=4, plan="recursive_doubling")
    with pytest.raises(UsageError, match="'tree'"):
        choose("allreduce", size=4, count=8, itemsize=4, plan="tree")


def test_little_staging_is_respected() -> None:
    for wire in (2, 4):
        for plan, same_host, variant in (("ring", False, "staged"), ("direct", True, "staged")):
            choice = choose(
                "allreduce", size=4, count=10**6, itemsize=4, wire_itemsize=wire, wired=wire == 2, plan=plan,
                same_host=same_host, variant=variant, staging_bytes=64 << 10,
            )  # fmt: skip
            assert choice.build(0).stage_elements * wire <= 64 << 10


def test_a_wire_keeps_final_values_out_of_the_neighbours_array() -> None:
    def landing(**arguments: Any) -> bool:
        choice = choose("allreduce", size=4, count=10**6, itemsize=4, same_host=False, **arguments)
        return bool(dict(choice.arguments)["direct_write"])

    assert landing() and landing(prescaled=True) and not landing(wired=True)


def test_mean_prescale() -> None:
    for size in range(1, 1000):
        prescale, divisor = mean_prescale(ReduceOp.MEAN, DTYPES["float16"], None, size)
        assert divisor == prescale * size
        assert abs(-np.log2(prescale) - np.log2(size) / 2) <= 0.5 + 1e-12
    assert mean_prescale(ReduceOp.MEAN, DTYPES["float32"], None, 6) == (1.0, 6.0)
    assert mean_prescale(ReduceOp.MEAN, DTYPES["float32"], DTYPES["float16"], 4) == (0.5, 2.0)
    assert mean_prescale(ReduceOp.SUM, DTYPES["float16"], None, 4) == (1.0, 1.0)
