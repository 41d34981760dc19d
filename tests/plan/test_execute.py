"""The slow executor, in random interleavings with late messages, against sums written down directly."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_families import FAMILIES

from gfkernels.plan import direct, doubling, many, ring
from gfkernels.plan.choose import mean_prescale
from gfkernels.plan.execute import Machine
from gfkernels.plan.model import Plan, PlanError
from gfkernels.plan.reference import combine
from gfkernels.types import DTYPES, FINAL, RAW_SOURCES, ROUND_RAW, DType, ReduceOp

Array = npt.NDArray[Any]


def _inputs(seed: int, calls: int, size: int, count: int, dtype: DType) -> list[list[list[Array]]]:
    random = np.random.default_rng(seed)
    return [[[random.integers(-4, 5, count).astype(dtype.numpy)] for _ in range(size)] for _ in range(calls)]


def _expected(collective: str, inputs: list[list[Array]], rank: int) -> Array:
    arrays = np.stack([given[0] for given in inputs])
    size = len(inputs)
    if collective == "allgather":
        return np.asarray(arrays.reshape(-1))
    if collective == "broadcast":
        return np.asarray(arrays[size // 2])
    total = arrays.sum(axis=0, dtype=arrays.dtype)
    return np.asarray(np.split(total, size)[rank] if collective == "reduce_scatter" else total)


SINGLE = [name for name in FAMILIES if "many" not in name and "barrier" not in name]


@pytest.mark.parametrize("name", SINGLE)
def test_every_family_computes_the_collective(name: str) -> None:
    # Small whole numbers are exact in fp16, so any order of addition gives the same.
    wire = DTYPES["float16"] if "packed1" in name and "landing1" not in name else None
    dtype = DTYPES["float32"] if wire else DTYPES["int32"]
    packed_without_wire = "packed1" in name and wire is None
    for size in (2, 3, 5):
        plans = FAMILIES[name](size, 23, 7)
        inputs = _inputs(size, 3, size, plans[0].count, dtype)
        machine = Machine(size, dtype, wire=wire, seed=size, late_puts=not plans[0].has_enter or size % 2 == 1)
        if packed_without_wire:
            dtype = DTYPES["float32"]
            inputs = _inputs(size, 3, size, plans[0].count, dtype)
            machine = Machine(size, dtype, seed=size)
        results = machine.run_calls([plans] * 3, inputs)
        for call in range(3):
            for rank in range(size):
                want = _expected(plans[0].collective, inputs[call], rank)
                assert np.array_equal(results[call][rank][0], want), f"size {size}, call {call}, rank {rank}"


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(SINGLE),
    size=st.integers(1, 6),
    count=st.integers(0, 60),
    segment=st.integers(4, 40),
    seed=st.integers(0, 2**32),
    late=st.booleans(),
)
def test_any_interleaving(name: str, size: int, count: int, segment: int, seed: int, late: bool) -> None:
    """Lanes, ranks and messages take turns by lot; one rank may be in its third call while another is in its first."""
    plans = FAMILIES[name](size, count, segment)
    dtype = DTYPES["float32"] if "packed1" in name else DTYPES["int16"]
    inputs = _inputs(seed, 3, size, plans[0].count, dtype)
    results = Machine(size, dtype, seed=seed, late_puts=late).run_calls([plans] * 3, inputs)
    for call in range(3):
        for rank in range(size):
            assert np.array_equal(results[call][rank][0], _expected(plans[0].collective, inputs[call], rank))


@settings(max_examples=30, deadline=None)
@given(
    names=st.lists(st.sampled_from([n for n in FAMILIES if "enter1" in n or "direct" in n]), min_size=2, max_size=5),
    size=st.integers(2, 4),
    count=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_any_order_of_collectives_on_one_host(names: list[str], size: int, count: int, seed: int) -> None:
    """Calls of different plans use the same counters and staging one after another."""
    calls = [FAMILIES[name](size, count, 12) for name in names]
    inputs = [_inputs(seed + i, 1, size, plans[0].count, DTYPES["float32"])[0] for i, plans in enumerate(calls)]
    results = Machine(size, DTYPES["float32"], seed=seed).run_calls(calls, inputs)
    for call, plans in enumerate(calls):
        for rank in range(size if plans[0].collective != "barrier" else 0):
            assert np.array_equal(results[call][rank][0], _expected(plans[0].collective, inputs[call], rank))


def _floats(size: int, count: int, dtype: DType) -> list[list[Array]]:
    random = np.random.default_rng(7)
    return [[(random.standard_normal(count) * 10.0 ** random.integers(-3, 4, count)).astype(dtype.numpy)]
            for _ in range(size)]  # fmt: skip


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX])
@pytest.mark.parametrize(
    ("dtype", "wire"), [("float32", None), ("float32", "float16"), ("float16", None), ("bfloat16", None)]
)
def test_all_direct_variants_give_equal_bits(op: ReduceOp, dtype: str, wire: str | None) -> None:
    array, travels = DTYPES[dtype], DTYPES[wire] if wire else None
    for size in (2, 5):
        inputs = _floats(size, 61, array)
        seen = set()
        for variant in direct.VARIANTS:
            plans = [
                direct.allreduce(
                    r, size, 61, variant=variant, packed=wire is not None, segment_elements=16, align_elements=4
                )
                for r in range(size)
            ]
            results = Machine(size, array, op=op, wire=travels).run(plans, inputs)
            seen |= {result[0].tobytes() for result in results}
        assert len(seen) == 1


@pytest.mark.parametrize(("dtype", "wire"), [("float32", "bfloat16"), ("float16", None), ("float32", None)])
@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
def test_mean_over_the_network(dtype: str, wire: str | None, algorithm: str) -> None:
    array, travels = DTYPES[dtype], DTYPES[wire] if wire else None
    for size in (2, 3, 4, 7):
        packed = wire is not None or mean_prescale(ReduceOp.MEAN, array, travels, size)[0] != 1
        plans: list[Plan] = [
            ring.allreduce(r, size, 50, packed=packed, segment_elements=4, align_elements=1)
            if algorithm == "ring"
            else doubling.allreduce(r, size, 50, packed=packed)
            for r in range(size)
        ]
        inputs = _floats(size, 50, array)
        results = Machine(size, array, op=ReduceOp.MEAN, wire=travels, seed=3).run(plans, inputs)
        assert len({result[0].tobytes() for result in results}) == 1
        stacked = np.stack([given[0].astype(np.float64) for given in inputs])
        error = np.abs(results[0][0].astype(np.float64) - stacked.mean(axis=0))
        step = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}[wire or dtype]
        assert np.all(error <= (size + 2) * step * np.abs(stacked).sum(axis=0) + 1e-6)


def test_mean_of_halves_near_the_top_does_not_overflow() -> None:
    dtype = DTYPES["float16"]
    plans = [ring.allreduce(r, 4, 9, packed=True, segment_elements=2, align_elements=1) for r in range(4)]
    inputs = [[np.full(9, 30000, np.float16)] for _ in range(4)]
    results = Machine(4, dtype, op=ReduceOp.MEAN).run(plans, inputs)
    assert all(np.all(result[0] == 30000) for result in results)


@pytest.mark.parametrize("variant", ["registered", "cma"])
def test_many(variant: str) -> None:
    counts = [300, 0, 5, 77, 16, 1000]
    random = np.random.default_rng(0)
    for size in (1, 2, 3):
        plans = [
            many.allreduce_many(r, size, counts, variant=variant, inline_nbytes=512, segment_elements=64)
            for r in range(size)
        ]
        inputs = [[random.integers(-9, 9, n).astype(np.float32) for n in counts] for _ in range(size)]
        results = Machine(size, DTYPES["float32"], seed=size).run(plans, inputs)
        for rank in range(size):
            for index in range(len(counts)):
                want = sum(given[index] for given in inputs)
                assert np.array_equal(results[rank][index], want)


def test_a_plan_that_cannot_go_on_is_reported() -> None:
    plans = [direct.barrier(r, 2, enter=False) for r in range(2)]
    plans[0].steps  # noqa: B018
    lonely = [plans[0], direct.barrier(1, 2, enter=True)]
    with pytest.raises(PlanError, match="deadlock"):
        Machine(2, DTYPES["float32"]).run(lonely, [[np.zeros(0, np.float32)]] * 2)


def test_reference_rounds_once_and_keeps_nan() -> None:
    f32, f16, f64 = DTYPES["float32"], DTYPES["float16"], DTYPES["float64"]
    one = [np.array([1.0, np.nan, -0.0, 65504.0, 2049.0], np.float32)]
    two = [np.array([2.0**-12, 1.0, 0.0, 65504.0, 0.0], np.float32)]
    to_wire, to_array = combine(ReduceOp.SUM, f32, f16, [], one + two, flags=RAW_SOURCES | FINAL | ROUND_RAW)
    assert to_wire is not None and to_wire.dtype == np.float16
    assert to_array.tolist()[0] == 1.0 and np.isnan(to_array[1]) and np.isinf(to_array[3]) and to_array[4] == 2048.0
    assert to_wire.view(np.uint16)[1] == 0x7E00
    _, low = combine(ReduceOp.MIN, f32, None, [], one + two)
    _, high = combine(ReduceOp.MAX, f32, None, [], one + two)
    assert np.isnan(low[1]) and np.signbit(low[2]) and not np.signbit(high[2])
    # 1 + 2^-11 + 2^-40 lies above the tie between two halves; by way of fp32 it would fall on it.
    value = [np.array([1 + 2.0**-11 + 2.0**-40])]
    halved, _ = combine(ReduceOp.SUM, f64, f16, [], value)
    assert halved is not None and float(halved[0]) == 1 + 2.0**-10
    wide = [np.array([1 + 2.0**-8 + 2.0**-40])]
    brain, _ = combine(ReduceOp.SUM, f64, DTYPES["bfloat16"], [], wide)
    assert brain is not None and float(brain[0]) == 1 + 2.0**-7
    wrapped = combine(ReduceOp.SUM, DTYPES["int8"], None, [], [np.array([127], np.int8), np.array([1], np.int8)])[1]
    assert wrapped.tolist() == [-128]
