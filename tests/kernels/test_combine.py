"""Every kernel against numpy: all ops, dtypes and wires, odd sizes and addresses, in place, nothing written outside."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_oracle import Case, cases, data, label, run, variants, verify

from gfkernels import kernels
from gfkernels.kernels import elements, emitter, objects
from gfkernels.types import DTYPES, FINAL, RAW_SOURCES, STREAMED, DType, ReduceOp

SIZES = (0, 1, 3, 7, 8, 31, 63, 64, 65, 127, 129, 1000, 4097)
Triple = tuple[ReduceOp, DType, "DType | None"]


@pytest.mark.parametrize("variant", variants(), ids=label)
def test_against_numpy(variant: Triple) -> None:
    address = kernels.combine(*variant)
    for case in cases(variant, SIZES):
        verify(address, case)


@pytest.mark.parametrize("variant", [v for v in variants() if v[1].kind == "f"], ids=label)
@pytest.mark.slow
def test_integer_conversions_against_numpy(variant: Triple) -> None:
    """The code for targets without fp16 instructions, on this machine."""
    parts = elements.Variant(*variant)
    code = objects.compile_object(emitter.emit(parts, objects.triple(), native_half=False))
    address = objects.load_object(code, parts.name)
    for case in cases(variant, (1, 7, 65, 1000), seed=2):
        verify(address, case)


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_nan_and_zeros_in_min_and_max(op: ReduceOp, name: str) -> None:
    """All pairs of special values, in both orders, in vectors and in the tail."""
    dtype = DTYPES[name]
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 6e-8, -6e-8]).astype(dtype.numpy)
    a, b = (np.tile(grid.ravel(), 3) for grid in np.meshgrid(special, special))
    verify(kernels.combine(op, dtype), Case(op, dtype, None, [], [a, b], 0, 2))


def test_integers_wrap() -> None:
    dtype = DTYPES["int8"]
    sources = [np.full(100, 100, np.int8), np.full(100, 100, np.int8)]
    _, (total,) = run(kernels.combine(ReduceOp.SUM, dtype), Case(ReduceOp.SUM, dtype, None, [], sources, 0, 1))
    assert (total == -56).all()


def test_bool_results_are_zero_or_one() -> None:
    """A byte of 2 is true in numpy; what comes out is a proper bool."""
    dtype = DTYPES["bool"]
    source = np.arange(200, dtype=np.uint8).view(np.bool_)
    case = Case(ReduceOp.MAX, dtype, None, [], [source, np.zeros(200, bool)], 0, 1)
    _, (result,) = run(kernels.combine(ReduceOp.MAX, dtype), case)
    assert result.view(np.uint8).tolist() == [0] + [1] * 199


def test_fp16_sum_is_rounded_once() -> None:
    """Adding many small numbers one by one in fp16 would stop growing; fp32 inside does not."""
    dtype = DTYPES["float16"]
    sources = [np.full(40, 2048.0, np.float16)] + [np.full(40, 1.0, np.float16)] * 6
    _, (total,) = run(kernels.combine(ReduceOp.SUM, dtype), Case(ReduceOp.SUM, dtype, None, [], sources, 0, 1))
    assert (total == 2054.0).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 1000])
def test_mean_neither_overflows_nor_vanishes(name: str, ranks: int) -> None:
    """With the scales that plans use, the mean of equal extreme values is that value."""
    dtype = DTYPES[name]
    k = round(np.log2(np.sqrt(ranks))) if dtype.itemsize == 2 else 0
    value = np.array([3.0e4, 2.0, 6.2e-5]).astype(dtype.numpy)
    sources = [np.tile(value, 20) for _ in range(ranks)]
    case = Case(ReduceOp.MEAN, dtype, None, [], sources, 0, 1, RAW_SOURCES | FINAL, 2.0**-k, ranks * 2.0**-k)
    verify(kernels.combine(ReduceOp.MEAN, dtype), case)
    _, (mean,) = run(kernels.combine(ReduceOp.MEAN, dtype), case)
    assert np.allclose(mean.astype(float), np.tile(value, 20).astype(float), rtol=2e-3)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_position_does_not_change_bits(name: str) -> None:
    """An element gives the same bits in a vector block as in the tail."""
    dtype = DTYPES[name]
    rng = np.random.default_rng(5)
    sources = [data(rng, dtype, 200) for _ in range(3)]
    for op in ReduceOp:
        address = kernels.combine(op, dtype)
        _, (whole,) = run(address, Case(op, dtype, None, [], sources, 0, 1, FINAL, 1.0, 3.0))
        for at in range(0, 200, 7):
            _, (one,) = run(
                address, Case(op, dtype, None, [], [s[at : at + 1] for s in sources], 0, 1, FINAL, 1.0, 3.0)
            )
            assert one.tobytes() == whole[at : at + 1].tobytes()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("variant", [v for v in variants() if v[2] is None], ids=label)
def test_in_place_on_all_ranks(variant: Triple, ranks: int) -> None:
    """What the owner of a slice does in registered memory; some kernels have loops of their own for it."""
    op, dtype, _ = variant
    rng = np.random.default_rng(ranks)
    for n in (31, 32, 333):
        for flags, scale, divisor in ((0, 1.0, 1.0), (RAW_SOURCES | FINAL, 0.5, 2.0), (RAW_SOURCES | FINAL, 1.0, 3.0)):
            sources = [data(rng, dtype, n) for _ in range(ranks)]
            scale = scale if dtype.itemsize == 2 else 1.0
            case = Case(op, dtype, None, [], sources, 0, ranks, flags, scale, divisor, in_place=True)
            verify(kernels.combine(op, dtype), case)


@pytest.mark.parametrize("variant", variants(), ids=label)
def test_past_the_caches(variant: Triple) -> None:
    """The same bits where the first destination is written past the caches."""
    address = kernels.combine(*variant)
    for case in cases(variant, (31, 64, 333, 4097), seed=3):
        # Only STAGE is written so, and what goes there is wire-typed where there is a wire.
        if not case.in_place and (case.wire is None or case.n_dst_wire):
            verify(address, dataclasses.replace(case, flags=case.flags | STREAMED))
