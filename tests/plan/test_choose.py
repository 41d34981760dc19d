"""Which plan is chosen for what, and what a choice refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gfkernels.errors import UsageError
from gfkernels.plan.check import check
from gfkernels.plan.choose import (
    CMA_MIN_NBYTES,
    CMA_MIN_NBYTES_OF_TWO,
    DOUBLING_NBYTES,
    INLINE_NBYTES,
    MAX_ROWS,
    PLANS,
    STAGE_CYCLE_NBYTES,
    choose,
    mean_prescale,
    stage_windows,
)
from gfkernels.plan.model import MAX_RING_LANES, PlanError
from gfkernels.plan.rules import check_rows
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
    # A setting of the whole communicator does not take the other collectives away.
    for collective in ("broadcast", "allgather", "reduce_scatter", "barrier"):
        assert choose(collective, size=4, count=8, itemsize=4, plan="recursive_doubling").kind == (
            choose(collective, size=4, count=8, itemsize=4).kind
        )
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


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("count", [1000, 10**6, 16 << 20, 2**31 + 11])
def test_segments_are_even_and_plans_short(size: int, count: int) -> None:
    kinds: list[dict[str, Any]] = [{"same_host": False}, {"variant": "staged"}, {"variant": "cma"}]
    for arguments in kinds:
        for collective in ("allreduce", "allgather", "broadcast", "reduce_scatter"):
            n = count // size * size
            choice = choose(collective, size=size, count=n, itemsize=4, **arguments)
            plan = choice.build(size - 1)
            assert len(plan.steps) <= MAX_ROWS + 1000
            lengths = plan.spans["count"]
            if plan.name == "ring" and collective == "allreduce" and count <= 10**6:
                # No short segment keeps a pipeline of few waiting.
                assert lengths.max() - lengths.min() <= max(64, lengths.max() // 4)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"same_host": False}, {"variant": "staged"}, {"variant": "cma"}, {}])
def test_rows_of_plans_beyond_31_bits(arguments: dict[str, Any]) -> None:
    for size in (2, 4):
        choice = choose("allreduce", size=size, count=2**31 + 11, itemsize=2, **arguments)
        plans = [choice.build(rank) for rank in range(size)]
        assert max(int((plan.spans["offset"] + plan.spans["count"]).max()) for plan in plans) == 2**31 + 11
        check_rows(plans)
    beyond = replace(plans[0], spans=plans[0].spans.copy())
    beyond.spans["offset"][-1] = 2**31 + 11
    with pytest.raises(PlanError, match="span"):
        check_rows([beyond, *plans[1:]])


def test_plans_that_would_fill_the_memory_are_refused() -> None:
    with pytest.raises(UsageError, match=r"2000000000 elements in segments of 16 .* rows, at most .*segment_bytes"):
        choose("allreduce", size=4, count=2 * 10**9, itemsize=4, same_host=False, segment_bytes=64)
    with pytest.raises(UsageError, match="rows"):
        choose("allreduce", size=4, count=2 * 10**9, itemsize=4, variant="staged", segment_bytes=64)
    with pytest.raises(PlanError, match="at most"):
        choose("allreduce", size=4, count=2**58, itemsize=4).build(0)


@settings(max_examples=80, deadline=None)
@given(
    collective=st.sampled_from(COLLECTIVES),
    size=st.integers(1, 6),
    count=st.integers(0, 900),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    wired=st.booleans(),
    prescaled=st.booleans(),
    same_host=st.booleans(),
    variant=st.sampled_from(["registered", "cma", "staged"]),
    plan=st.sampled_from(PLANS),
    out=st.booleans(),
    segment_bytes=st.none() | st.integers(200, 4000),
    lanes=st.none() | st.integers(1, 5),
    inline_bytes=st.sampled_from([0, 64, 8192]),
    staging_bytes=st.integers(16 << 10, 1 << 20),
    root=st.integers(0, 5),
)
def test_any_choice_is_right_or_refused(
    collective: str, size: int, count: int, itemsize: int, wired: bool, prescaled: bool, same_host: bool, variant: str,
    plan: str, out: bool, segment_bytes: int | None, lanes: int | None, inline_bytes: int, staging_bytes: int,
    root: int,
) -> None:  # fmt: skip
    if collective == "reduce_scatter":
        count -= count % size
    wire = 2 if wired and itemsize >= 4 else itemsize
    try:
        choice = choose(
            collective, size=size, count=count, itemsize=itemsize, wire_itemsize=wire, wired=wire != itemsize,
            prescaled=prescaled, same_host=same_host, variant=variant, plan=plan, out=out, root=root % size,
            segment_bytes=segment_bytes, lanes=lanes, inline_bytes=inline_bytes, staging_bytes=staging_bytes,
        )  # fmt: skip
    except UsageError:
        assert plan in ("direct", "recursive_doubling")
        return
    plans = [choice.build(rank) for rank in range(size)]
    check(plans, calls=2)
    for built in plans:
        assert built.has_enter == same_host
        assert built.stage_elements * wire <= staging_bytes
        assert built.inline_elements * wire <= inline_bytes
        assert built.n_lanes <= MAX_RING_LANES


@pytest.mark.parametrize("nbytes", [1, 64, 4096, 4097, 64 << 10, 100_001, 256 << 10, 600 << 10, 1 << 20, 16 << 20])
@pytest.mark.parametrize("staging_bytes", [64 << 10, 1 << 20, 16 << 20])
def test_windows_fit_into_staging_and_are_odd(nbytes: int, staging_bytes: int) -> None:
    nbytes = min(nbytes, staging_bytes)
    window_nbytes, n_windows = stage_windows(nbytes, staging_bytes)
    assert window_nbytes >= nbytes and window_nbytes % 4096 == 0 and n_windows % 2 == 1
    assert n_windows == 1 or n_windows * window_nbytes <= min(staging_bytes, STAGE_CYCLE_NBYTES)
    # Two more would not fit.
    assert (n_windows + 2) * window_nbytes > min(staging_bytes, STAGE_CYCLE_NBYTES)


@pytest.mark.parametrize(("size", "limit"), [(2, CMA_MIN_NBYTES_OF_TWO), (3, CMA_MIN_NBYTES), (4, CMA_MIN_NBYTES)])
def test_arrays_are_staged_up_to_where_attaching_pays(size: int, limit: int) -> None:
    def name(nbytes: int, **more: Any) -> str:
        return choose("allreduce", size=size, count=nbytes // 4, itemsize=4, variant="cma", **more).build(0).name

    assert name(limit - 4) == "direct.staged" and name(limit) == "direct.cma"
    assert name(limit - 4, cma_min_bytes=0) == "direct.cma"
    assert name(1 << 20, cma_min_bytes=1 << 20) == "direct.cma"
