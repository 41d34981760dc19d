"""Owns the tests of the tests' own truth: a wrong sum must not pass, and known sums must."""

from __future__ import annotations

import math
from fractions import Fraction

import exact_sums as truth
import ml_dtypes
import numpy as np
import pytest
import rank_calls


def _inputs(dtype: str, size: int, count: int = 400, op: str = "sum") -> list[truth.Array]:
    return [truth.values([7, 1], dtype, count, q, op=op) for q in range(size)]


def _fails(check: object, *arguments: object) -> None:
    with pytest.raises(AssertionError):
        check(*arguments)  # type: ignore[operator]


@pytest.mark.parametrize("wire", [None, *truth.WIRES])
@pytest.mark.parametrize("dtype", truth.FLOATS)
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("size", [2, 7])
def test_the_documented_sum_is_within_the_bound_and_wrong_ones_are_not(
    dtype: str, op: str, size: int, wire: str | None
) -> None:
    inputs = _inputs(dtype, size, op=op)
    good = truth.documented(op, inputs, wire)
    truth.within_bound(op, good, inputs, wire, "good")
    _fails(truth.within_bound, op, truth.documented(op, [*inputs[:-1], inputs[0]], wire), inputs, wire, "twice")
    for lost in (slice(0, 20), slice(380, 400)):
        bad = good.copy()
        bad[lost] = 0
        _fails(truth.within_bound, op, bad, inputs, wire, "some elements lost")
    bad = np.roll(good, 1)
    _fails(truth.within_bound, op, bad, inputs, wire, "moved by one")
    bad = good.copy()
    truth.bits(bad)[5] ^= 1
    _fails(truth.check_bits, bad, good, "one bit")


@pytest.mark.parametrize("size", [2, 3, 5])
def test_double_sums_agree_with_exact_ones(size: int) -> None:
    inputs = _inputs("float64", size, 50)
    want = truth.exact("sum", inputs)
    for i in range(50):
        assert abs(float(want[i]) - math.fsum(float(x[i]) for x in inputs)) < 1e-15 * 100
    assert truth.documented("sum", inputs)[3] == sum(float(x[3]) for x in inputs)


def test_the_order_matters_and_is_ascending() -> None:
    inputs = [np.array([x], np.float32) for x in (1e8, 1.0, -1e8)]
    assert truth.documented("sum", inputs)[0] == 0
    assert truth.documented("sum", [inputs[0], inputs[2], inputs[1]])[0] == 1


def test_special_values() -> None:
    def one(name: str, *numbers: float) -> list[truth.Array]:
        return [np.array([x]).astype(truth.numpy_dtype(name)) for x in numbers]

    for name in truth.FLOATS:
        assert np.isnan(truth.documented("min", one(name, 1, np.nan)).astype(float)[0])
        assert np.isnan(truth.documented("max", one(name, np.nan, 1)).astype(float)[0])
        for pair in ((0.0, -0.0), (-0.0, 0.0)):
            assert np.signbit(truth.documented("min", one(name, *pair)).astype(float)[0])
            assert not np.signbit(truth.documented("max", one(name, *pair)).astype(float)[0])
    assert truth.documented("sum", one("float16", 65504, 65504))[0] == np.inf
    assert truth.documented("mean", one("float16", 65504, 65504))[0] == 65504
    assert truth.bits(truth.documented("sum", one("bfloat16", np.inf, -np.inf)))[0] == 0x7FC0
    assert truth.prescale("mean", "float32", "float16", 4) == 0.5 and truth.prescale("mean", "float32", None, 4) == 1


def test_rounding_from_double_to_bfloat16_happens_once() -> None:
    rng = np.random.default_rng(3)
    wide = np.concatenate([
        rng.standard_normal(3000) * np.exp2(rng.integers(-140, 127, 3000).astype(float)),
        (1 + rng.integers(0, 256, 2000) / 256) * (1 + rng.choice([0, 1, -1], 2000) * 2.0**-45),  # next to ties
    ])  # fmt: skip
    got = truth.rounded(wide, "bfloat16").astype(np.float64)
    for value, result in zip(wide, got, strict=True):
        exponent = max(math.frexp(value)[1] - 1, -126) - 7
        unit = Fraction(2) ** exponent
        assert result == float(round(Fraction(float(value)) / unit) * unit), (value, result)


def test_wild_values_hold_what_they_should() -> None:
    for dtype in truth.FLOATS:
        with np.errstate(invalid="ignore"):
            x = truth.values([3], dtype, 3000, 0, wild=True).astype(np.float64)
        assert np.isnan(x).any() and np.isinf(x).any() and (np.signbit(x) & (x == 0)).any()
        tiny = float(ml_dtypes.finfo(truth.numpy_dtype(dtype)).tiny)
        assert ((np.abs(x) < tiny) & (x != 0)).any()
    assert len({truth.digest(truth.values([3], "int32", 50, q)) for q in range(5)}) == 5


def test_one_wrong_element_of_a_large_result_is_found() -> None:
    inputs = [truth.values([8], "float32", 10_007, q) for q in range(3)]
    good = np.resize(truth.documented("sum", inputs), 250_000)
    rank_calls._check_bound("sum", good, inputs, None, "good")
    for at in (0, 10_007, 123_456, 249_999):
        bad = good.copy()
        bad[at] += 1
        _fails(rank_calls._check_bound, "sum", bad, inputs, None, "bad")
        bad[at] = np.nan
        _fails(rank_calls._check_bound, "sum", bad, inputs, None, "bad")
