"""Conversions to and from 16-bit floats: all 65536 values, every tie and its neighbours, with and without F16C."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_oracle import NAN_BITS, Array, Case, canonical, compare, round_to, run

from gfkernels.kernels import elements, emitter, objects
from gfkernels.types import DTYPES, DType, ReduceOp

HALVES = [False] + ([True] if objects.native_half() else [])
WIRES = ["float16", "bfloat16"]


@functools.cache
def kernel(dtype: str, wire: str, native_half: bool) -> int:
    parts = elements.Variant(ReduceOp.SUM, DTYPES[dtype], DTYPES[wire])
    code = objects.compile_object(emitter.emit(parts, objects.triple(), native_half))
    return objects.load_object(code, parts.name)


def widen(wire: DType, values: Array, native_half: bool, dtype: str = "float32") -> Array:
    """Wire values as an array dtype, by a copy from one wire source to one array destination."""
    case = Case(ReduceOp.SUM, DTYPES[dtype], wire, [values], [], 0, 1)
    return run(kernel(dtype, wire.name, native_half), case)[1][0]


def narrow(wire: DType, values: Array, native_half: bool, dtype: str = "float32") -> Array:
    """Array values as the wire dtype."""
    case = Case(ReduceOp.SUM, DTYPES[dtype], wire, [], [values], 1, 0)
    return run(kernel(dtype, wire.name, native_half), case)[0][0]


@pytest.mark.parametrize("native_half", HALVES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", WIRES)
def test_all_16_bit_values_both_ways(name: str, dtype: str, native_half: bool) -> None:
    wire = DTYPES[name]
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(wire.numpy)
    wide = widen(wire, every, native_half, dtype)
    with np.errstate(all="ignore"):
        compare(wide, canonical(every.astype(dtype), DTYPES[dtype]))
    compare(narrow(wire, wide, native_half, dtype), canonical(every, wire))


@pytest.mark.parametrize("native_half", HALVES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", WIRES)
def test_all_ties_and_their_neighbours(name: str, dtype: str, native_half: bool) -> None:
    """Half-way points go to even; the next float on either side goes to its own side, also from fp64."""
    wire = DTYPES[name]
    infinity = 0x7C00 if name == "float16" else 0x7F80
    positive = np.arange(infinity, dtype=np.uint16).view(wire.numpy).astype(np.float64)
    following = np.append(positive[1:], 2 * positive[-1] - positive[-2])
    ties = ((positive + following) / 2).astype(dtype)
    zero, inf = np.zeros(1, dtype), np.full(1, np.inf, dtype)
    values = np.concatenate([ties, np.nextafter(ties, zero), np.nextafter(ties, inf)])
    values = np.concatenate([values, -values])
    compare(narrow(wire, values, native_half, dtype), round_to(values, wire))


def test_the_oracle_agrees_with_numpy() -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 256, 80000, dtype=np.uint8).view(np.float32)
    values = np.concatenate([values, (rng.standard_normal(20000) * 10.0 ** rng.integers(-9, 6, 20000)).astype("f4")])
    with np.errstate(all="ignore"):
        for name in WIRES:
            dtype = DTYPES[name]
            compare(round_to(values, dtype), canonical(values.astype(dtype.numpy), dtype))


@pytest.mark.parametrize("native_half", HALVES)
@pytest.mark.parametrize("name", WIRES)
@settings(max_examples=200, deadline=None)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_any_fp32(name: str, native_half: bool, values: list[float]) -> None:
    array = np.array(values, np.float32)
    compare(narrow(DTYPES[name], array, native_half), round_to(array, DTYPES[name]))


@pytest.mark.parametrize("native_half", HALVES)
@pytest.mark.parametrize("name", WIRES)
@settings(max_examples=200, deadline=None)
@given(values=st.lists(st.floats(width=64), min_size=1, max_size=40))
def test_any_fp64_is_rounded_once(name: str, native_half: bool, values: list[float]) -> None:
    array = np.array(values, np.float64)
    compare(narrow(DTYPES[name], array, native_half, "float64"), round_to(array, DTYPES[name]))


@pytest.mark.parametrize("native_half", HALVES)
@pytest.mark.parametrize("name", WIRES)
def test_nan_payloads_do_not_travel(name: str, native_half: bool) -> None:
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0x7FC12345] * 9, np.uint32).view(np.float32)
    assert (narrow(DTYPES[name], nans, native_half).view(np.uint16) == NAN_BITS[name]).all()
