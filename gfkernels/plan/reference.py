"""Owns the meaning of COMBINE, written in numpy: what the compiled kernels must equal bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gfkernels.types import FINAL, RAW_SOURCES, ROUND_RAW, DType, ReduceOp

Array = npt.NDArray[Any]


def compute_dtype(dtype: DType) -> np.dtype[Any]:
    """What is calculated in: fp64 for float64, fp32 for the other floats, else the integers themselves."""
    if dtype.kind != "f":
        return dtype.numpy
    return np.dtype(np.float64 if dtype.name == "float64" else np.float32)


def round_to(values: Array, dtype: DType) -> Array:
    """Rounds once, to nearest even; every NaN becomes the positive quiet one."""
    target = dtype.numpy
    if dtype.kind != "f":
        return values.astype(target, copy=False)
    with np.errstate(all="ignore"):
        if values.dtype == np.float64 and dtype.name == "bfloat16":
            values = _round_to_odd(values)
        result = values.astype(target)
    nan = np.isnan(values)
    if nan.any():
        result[nan] = np.zeros(1, target) + np.array(np.nan, target)
    return result


def _round_to_odd(values: Array) -> Array:
    # ml_dtypes goes by way of fp32; an inexact fp32 value with an odd last bit cannot be a tie of 16 bits.
    near = values.astype(np.float32)
    bits = near.view(np.uint32)
    bits = bits - (np.abs(near.astype(np.float64)) > np.abs(values)).astype(np.uint32)
    inexact = (near.astype(np.float64) != values) & ~np.isnan(values)
    return np.asarray((bits | inexact.astype(np.uint32)).view(np.float32))


def combine(
    op: ReduceOp,
    dtype: DType,
    wire: DType | None,
    src_wire: Sequence[Array],
    src_array: Sequence[Array],
    *,
    flags: int = 0,
    prescale: float = 1.0,
    divisor: float = 1.0,
) -> tuple[Array | None, Array]:
    """One COMBINE.

    Args:
        op: the reduction.
        dtype: of the arrays.
        wire: what travels, or None.
        src_wire: wire-typed operands, first in order.
        src_array: array-typed operands.
        flags: of the row.
        prescale: mean's factor for raw operands.
        divisor: mean's divisor.

    Returns:
        (what wire-typed destinations hold or None without a wire, what array-typed ones hold).
    """
    kind = compute_dtype(dtype)
    operands = [source.astype(kind) for source in src_wire]
    with np.errstate(all="ignore"):
        for source in src_array:
            value = source.astype(kind)
            if op == ReduceOp.MEAN and flags & RAW_SOURCES:
                value = value * kind.type(prescale)
            if wire is not None and flags & ROUND_RAW:
                value = round_to(value, wire).astype(kind)
            operands.append(value)
        total = operands[0].copy()
        for operand in operands[1:]:
            total = _step(op, total, operand)
        if op == ReduceOp.MEAN and flags & FINAL:
            total = total / kind.type(divisor)
    if wire is None:
        return None, round_to(total, dtype)
    rounded = round_to(total, wire)
    return rounded, round_to(rounded.astype(kind), dtype)


def _step(op: ReduceOp, left: Array, right: Array) -> Array:
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return np.asarray(left + right)
    if op == ReduceOp.PROD:
        return np.asarray(left * right)
    if left.dtype.kind != "f":
        return np.asarray(np.minimum(left, right) if op == ReduceOp.MIN else np.maximum(left, right))
    # numpy does not order zeros by sign: where the operands compare equal, bits decide.
    result = np.minimum(left, right) if op == ReduceOp.MIN else np.maximum(left, right)
    equal = left == right
    negative = np.signbit(left) | np.signbit(right) if op == ReduceOp.MIN else np.signbit(left) & np.signbit(right)
    return np.asarray(np.where(equal, np.copysign(left, np.where(negative, -1.0, 1.0)), result), left.dtype)
