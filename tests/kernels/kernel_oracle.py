"""Owns the truth that kernels are tested against (slow numpy, no shared code), and the harness that calls them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gfkernels.errors import UsageError
from gfkernels.kernels import check
from gfkernels.types import DTYPES, FINAL, RAW_SOURCES, ROUND_RAW, STREAMED, DType, ReduceOp

Array = npt.NDArray[Any]

COMBINE = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
NAN_BITS = {"float64": 0x7FF8000000000000, "float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}
_FORMAT = {"float16": (10, -14, 65536.0), "bfloat16": (7, -126, 2.0**128)}
_GUARD = 64
_POISON = 0xA5


def variants() -> list[tuple[ReduceOp, DType, DType | None]]:
    """Every (op, dtype, wire) that exists."""
    found: list[tuple[ReduceOp, DType, DType | None]] = []
    for dtype in DTYPES.values():
        for op in ReduceOp:
            for wire in (None, DTYPES["float16"], DTYPES["bfloat16"]):
                try:
                    check(op, dtype, wire)
                except UsageError:
                    continue
                if wire is None or wire.name != dtype.name:
                    found.append((op, dtype, wire))
    return found


def label(variant: tuple[ReduceOp, DType, DType | None]) -> str:
    """A test id."""
    op, dtype, wire = variant
    return f"{op.label}-{dtype.name}" + (f"-{wire.name}" if wire else "")


def bits(array: Array) -> Array:
    """The array's elements as unsigned integers."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def canonical(array: Array, dtype: DType) -> Array:
    """A copy with every NaN replaced by the one that kernels write."""
    if dtype.kind != "f":
        return array.copy()
    result = array.copy()
    with np.errstate(all="ignore"):
        is_nan = np.isnan(array.astype(np.float64))
    bits(result)[is_nan] = NAN_BITS[dtype.name]
    return result


def round_to(value: Array, dtype: DType) -> Array:
    """fp32 or fp64 values as `dtype`, rounded once to nearest even, by exact fp64 arithmetic on whole units."""
    if dtype.name not in _FORMAT:
        return canonical(value.astype(dtype.numpy), dtype)
    fraction_bits, lowest, limit = _FORMAT[dtype.name]
    wide = value.astype(np.float64)
    _, exponent = np.frexp(np.where(np.isfinite(wide), wide, 1.0))
    unit = np.exp2(np.maximum(exponent - 1, lowest).astype(np.float64) - fraction_bits)
    with np.errstate(all="ignore"):
        rounded = np.where(np.isfinite(wide), np.rint(wide / unit) * unit, wide)
    rounded = np.where(np.abs(rounded) >= limit, np.copysign(np.inf, wide), rounded)
    return canonical(rounded.astype(dtype.numpy), dtype)  # exact by now


def _pair(op: ReduceOp, a: Array, b: Array) -> Array:
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return np.asarray(a + b)
    if op == ReduceOp.PROD:
        return np.asarray(a * b)
    low = op == ReduceOp.MIN
    result = np.asarray(np.minimum(a, b) if low else np.maximum(a, b))
    if a.dtype.kind == "f":
        negative = (np.signbit(a) | np.signbit(b)) if low else (np.signbit(a) & np.signbit(b))
        zero = result == 0
        both = (a == 0) & (b == 0)
        result = np.where(zero & both, np.where(negative, -0.0, 0.0).astype(a.dtype), result)
    return result


@dataclass
class Case:
    """One call: operands and what is asked."""

    op: ReduceOp
    dtype: DType
    wire: DType | None
    wire_sources: list[Array]
    array_sources: list[Array]
    n_dst_wire: int
    n_dst_array: int
    flags: int = 0
    prescale: float = 1.0
    divisor: float = 1.0
    misalign: int = 0
    in_place: bool = False
    outputs: list[Array] = field(default_factory=list)


def expected(case: Case) -> tuple[Array | None, Array]:
    """What wire destinations and array destinations hold afterwards."""
    dtype, wire = case.dtype, case.wire
    compute: Any = dtype.numpy if dtype.kind != "f" else np.dtype("f8" if dtype.name == "float64" else "f4")
    with np.errstate(all="ignore"):
        operands = [source.astype(compute) for source in case.wire_sources]
        for source in case.array_sources:
            value = source.astype(compute)
            if case.op == ReduceOp.MEAN and case.flags & RAW_SOURCES:
                value = value * compute.type(case.prescale)
            if wire is not None and case.flags & ROUND_RAW:
                value = round_to(value, wire).astype(compute)
            operands.append(value)
        total = operands[0]
        for operand in operands[1:]:
            total = _pair(case.op, total, operand)
        if case.op == ReduceOp.MEAN and case.flags & FINAL:
            total = total / compute.type(case.divisor)
        if dtype.kind != "f":
            return None, total.astype(dtype.numpy)
        if wire is None:
            return None, round_to(total, dtype)
        travelled = round_to(total, wire)
        return travelled, round_to(travelled.astype(compute), dtype)


def _place(array: Array | None, n: int, dtype: DType, misalign: int) -> tuple[Array, Array]:
    """(raw bytes with poison around, the span in it); its address is aligned to the itemsize, not to vectors."""
    nbytes = n * dtype.itemsize
    raw = np.full(nbytes + 2 * _GUARD + 256, _POISON, np.uint8)
    start = -raw.ctypes.data % 64 + _GUARD // 2 + misalign % 24 * dtype.itemsize
    span = raw[start : start + nbytes].view(dtype.numpy)
    if array is not None:
        span[:] = array
    return raw, span


def run(address: int, case: Case) -> tuple[list[Array], list[Array]]:
    """Calls a kernel on copies; returns wire and array destinations. Fails on a byte written outside these."""
    wire = case.wire or case.dtype
    n = (case.wire_sources + case.array_sources)[0].size
    misalign = case.misalign
    placed_wire = [_place(source, n, wire, misalign + k) for k, source in enumerate(case.wire_sources)]
    placed_array = [_place(source, n, case.dtype, misalign + 2 * k) for k, source in enumerate(case.array_sources)]
    wire_outs = (placed_wire if case.in_place else [])[: case.n_dst_wire]
    array_outs = (placed_array if case.in_place else [])[: case.n_dst_array]
    wire_outs = wire_outs + [_place(None, n, wire, misalign + 1) for _ in range(case.n_dst_wire - len(wire_outs))]
    array_outs = array_outs + [
        _place(None, n, case.dtype, misalign + 3) for _ in range(case.n_dst_array - len(array_outs))
    ]
    if case.flags & STREAMED:
        # The first destination begins on a cache line.
        outs, dtype = (wire_outs, wire) if wire_outs else (array_outs, case.dtype)
        raw, _ = _place(None, n, dtype, 0)
        start = -raw.ctypes.data % 64 + _GUARD
        outs[0] = (raw, raw[start : start + n * dtype.itemsize].view(dtype.numpy))
        assert outs[0][1].ctypes.data % 64 == 0
    everything = placed_wire + placed_array + wire_outs + array_outs
    # Empty views have no address of their own; any will do for them.
    spans = [span.__array_interface__["data"][0] for _, span in everything]
    untouched = [
        (raw, span, span.copy())
        for raw, span in placed_wire + placed_array
        if not any(span is out for _, out in wire_outs + array_outs)
    ]
    pointers = np.array(spans, np.int64)
    counts = np.array([len(placed_wire), len(placed_array), len(wire_outs), len(array_outs), case.flags], np.int64)
    args = np.array([case.prescale, case.divisor])
    status = COMBINE(address)(pointers.ctypes.data, counts.ctypes.data, n, args.ctypes.data)
    assert status == 0
    for raw, span in everything:
        start = span.__array_interface__["data"][0] - raw.ctypes.data if n else 0
        outside = np.concatenate([raw[:start], raw[start + span.nbytes :]])
        assert (outside == _POISON).all(), "a byte outside the span was written"
    for _, span, before in untouched:
        assert np.array_equal(bits(span), bits(before)), "a source was written"
    return [span for _, span in wire_outs], [span for _, span in array_outs]


def verify(address: int, case: Case) -> None:
    """Runs a case and compares every destination bit for bit."""
    wire_want, array_want = expected(case)
    wire_got, array_got = run(address, case)
    for got in wire_got:
        assert wire_want is not None
        compare(got, wire_want, case)
    for got in array_got:
        compare(got, array_want, case)


def compare(got: Array, want: Array, case: Case | None = None) -> None:
    """Bitwise equality, with the first difference shown."""
    wrong = np.flatnonzero(bits(got) != bits(want))
    if wrong.size:
        at = int(wrong[0])
        operands = [source[at] for source in case.wire_sources + case.array_sources] if case else []
        raise AssertionError(
            f"{wrong.size} of {got.size} differ, first at {at}: got {got[at]!r} ({int(bits(got)[at]):#x}), want "
            f"{want[at]!r} ({int(bits(want)[at]):#x}), operands {operands}"
        )


def data(rng: np.random.Generator, dtype: DType, n: int, moderate: bool | None = None) -> Array:
    """Elements to reduce: any bits at all (NaN, inf, -0, subnormals, extremes), mixed with ordinary numbers."""
    if dtype.kind == "b":
        return np.asarray(rng.integers(0, 2, n).astype(bool))
    raw = rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8).view(dtype.numpy)
    if dtype.kind != "f":
        return raw
    ordinary = rng.standard_normal(n).astype(dtype.numpy)
    wild = rng.random(n) < 0.3 if moderate is None else np.full(n, not moderate)
    result = np.where(wild, raw, ordinary)
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 6e-8, -3e-41, 65520.0, 3.4e38]).astype(np.float64)
    with np.errstate(all="ignore"):
        specials = special.astype(dtype.numpy)
    where = rng.random(n) < (0.1 if moderate is None else 0.0)
    result[where] = rng.choice(specials, int(where.sum()))
    return np.asarray(result)


def cases(variant: tuple[ReduceOp, DType, DType | None], sizes: Sequence[int], seed: int = 1) -> list[Case]:
    """A spread of calls of one variant: every size with every number of sources and of destinations from 1 to 7."""
    op, dtype, wire = variant
    rng = np.random.default_rng(seed)
    found: list[Case] = []
    turn = 0
    for n in sizes:
        for k in range(1, 8):
            turn += 1
            n_src_wire = 0 if wire is None else (0, k, k // 2, 1)[turn % 4]
            n_dst = (turn * 3) % 7 + 1
            n_dst_wire = 0 if wire is None else (0, n_dst, n_dst // 2)[turn % 3]
            flags = turn % 8
            found.append(
                Case(
                    op,
                    dtype,
                    wire,
                    [data(rng, wire, n) for _ in range(n_src_wire)] if wire else [],
                    [data(rng, dtype, n) for _ in range(k - n_src_wire)],
                    n_dst_wire,
                    n_dst - n_dst_wire,
                    flags,
                    _prescale(dtype, wire, turn),
                    (1.0, 2.0, 3.0, 0.75, 4.0, 7.0)[turn % 6],
                    misalign=turn % 9,
                    in_place=turn % 2 == 0,
                )
            )
    return found


def _prescale(dtype: DType, wire: DType | None, turn: int) -> float:
    # Plans scale beforehand only where something narrow travels.
    narrow = wire is not None or dtype.name in ("float16", "bfloat16")
    return (1.0, 0.5, 0.25)[turn % 3] if narrow else 1.0
