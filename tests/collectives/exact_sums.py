"""Owns the truth that collectives are tested against: inputs that every rank can make, documented sums, and bounds.

Shares no code with the library. `documented` is the arithmetic of the `direct` plans, bit for bit: operands scaled and
rounded to the wire, reduced in ascending rank order in fp32 (fp64 for float64), divided, rounded to the wire, rounded
to the array's type. `within_bound` is for plans that add in another order and round on the way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLOATS: Final = ("float64", "float32", "float16", "bfloat16")
INTEGERS: Final = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES: Final = (*FLOATS, *INTEGERS, "bool")
OPS: Final = ("sum", "mean", "prod", "min", "max")
WIRES: Final = ("float16", "bfloat16")
NARROW: Final = ("float16", "bfloat16")
_NAN: Final = {"float64": 0x7FF8000000000000, "float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}
_UNIT: Final = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_TINY: Final = {"float64": 0.0, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
POISON: Final = 0xA5


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def name_of(array: Array) -> str:
    """The name of an array's element type."""
    return str(array.dtype)


def ops_of(dtype: str) -> tuple[str, ...]:
    """The reductions that a dtype has."""
    if dtype == "bool":
        return ("min", "max")
    return OPS if dtype in FLOATS else tuple(op for op in OPS if op != "mean")


def values(seed: Sequence[int], dtype: str, count: int, rank: int, *, op: str = "sum", wild: bool = False) -> Array:
    """One rank's input, the same wherever it is made.

    Args:
        seed: of the case.
        dtype: element type.
        count: elements.
        rank: whose.
        op: products get factors near 1, so that they stay numbers.
        wild: any bits at all: NaN, infinities, -0, subnormals, values whose sum overflows.
    """
    rng = np.random.default_rng([*seed, count, rank])
    element = numpy_dtype(dtype)
    if dtype == "bool":
        return np.asarray(rng.integers(0, 2, count).astype(bool))
    raw = np.frombuffer(rng.bytes(count * element.itemsize), element)
    if dtype in INTEGERS:
        return raw.copy()
    if op == "prod":
        ordinary = rng.choice([-1.0, 1.0], count) * rng.uniform(0.7, 1.4, count)
    else:
        ordinary = rng.standard_normal(count) * np.exp2(rng.integers(-4, 5, count))
    result = ordinary.astype(element)
    return _with_wild(result, raw, rng) if wild else result


def _with_wild(result: Array, raw: Array, rng: np.random.Generator) -> Array:
    element, count = result.dtype, result.size
    info: Any = ml_dtypes.finfo(element)
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], np.float64).astype(element)
    numbers = [info.max, -info.max, info.smallest_subnormal, -info.smallest_subnormal, info.tiny]
    limits = np.array(numbers, element)
    picked = rng.integers(0, 4, count)
    result[picked == 1] = raw[picked == 1]
    both = np.concatenate([special, limits])
    result[picked == 2] = both[rng.integers(0, both.size, count)][picked == 2]
    return result


def bits(array: Array) -> Array:
    """The elements as unsigned integers."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def digest(array: Array) -> str:
    """A hash of the bytes, to compare between ranks."""
    return hashlib.sha256(array.tobytes()).hexdigest()


def rounded(value: Array, name: str) -> Array:
    """fp32 or fp64 values to nearest-even of another float type, every NaN made canonical."""
    with np.errstate(all="ignore"):
        if name == "bfloat16" and value.dtype == np.float64:
            result = _to_bfloat16(value)
        else:
            result = value.astype(numpy_dtype(name))
    unsigned = result.view(f"u{result.dtype.itemsize}")
    unsigned[np.isnan(value)] = _NAN[name]
    return result


def _to_bfloat16(value: Array) -> Array:
    """fp64 to bfloat16 rounded once: by way of fp32 rounded to odd, which keeps every tie apart."""
    single = value.astype(np.float32)
    back = single.astype(np.float64)
    word = single.view(np.uint32)
    inexact = (back != value) & np.isfinite(value)
    # Towards zero, then the last bit set: what was cut off still decides ties.
    away = inexact & (np.abs(back) > np.abs(value))
    word[away] -= 1
    word[inexact] |= 1
    return np.asarray(word.view(np.float32).astype(ml_dtypes.bfloat16))


def _compute_dtype(dtype: str) -> np.dtype[Any]:
    if dtype not in FLOATS:
        return np.dtype(dtype)
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def _pair(op: str, a: Array, b: Array) -> Array:
    if op in ("sum", "mean"):
        return np.asarray(a + b)
    if op == "prod":
        return np.asarray(a * b)
    if a.dtype.kind != "f":
        return np.asarray(np.minimum(a, b) if op == "min" else np.maximum(a, b))
    # -0 is below +0: of equal operands the sign decides.
    smaller = (a < b) | ((a == b) & np.signbit(a))
    result = np.where(smaller, a, b) if op == "min" else np.where(smaller, b, a)
    return np.asarray(np.where(np.isnan(a) | np.isnan(b), np.array(np.nan, a.dtype), result))


def prescale(op: str, dtype: str, wire: str | None, size: int) -> float:
    """What mean multiplies 16-bit contributions by before they are added: 2^-k, k = round(log2 sqrt(size))."""
    if op != "mean" or (wire or dtype) not in NARROW:
        return 1.0
    k = 0
    while 2 * 4**k <= size:  # log2(sqrt(size)) is k + 1/2 or more
        k += 1
    return 2.0**-k


def documented(op: str, inputs: Sequence[Array], wire: str | None = None) -> Array:
    """What every `direct` plan must give, bit for bit."""
    dtype = name_of(inputs[0])
    wire = None if wire == dtype or dtype not in FLOATS else wire
    compute = _compute_dtype(dtype)
    scale = prescale(op, dtype, wire, len(inputs))
    total: Array | None = None
    with np.errstate(all="ignore"):
        for one in inputs:
            operand = one.astype(compute)
            if op == "mean":
                operand = operand * compute.type(scale)
            if wire is not None:
                operand = rounded(operand, wire).astype(compute)
            total = operand if total is None else _pair(op, total, operand)
        assert total is not None
        if op == "mean":
            total = total / compute.type(len(inputs) * scale)
        if dtype not in FLOATS:
            return total
        if wire is not None:
            total = rounded(total, wire).astype(compute)
        return rounded(total, dtype)


def exact(op: str, inputs: Sequence[Array]) -> Array:
    """The reduction with 64 bits of fraction; integers modulo 2^n."""
    wide = [x if x.dtype.kind in "iub" else x.astype(np.longdouble) for x in inputs]
    total = wide[0].copy()
    for one in wide[1:]:
        total = _pair(op, total, one)
    return np.asarray(total / len(inputs) if op == "mean" else total)


def check_bits(got: Array, want: Array, what: str) -> None:
    """Bitwise equality, the first difference shown."""
    assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {got.dtype}{got.shape}, want {want.shape}"
    wrong = np.flatnonzero(bits(got) != bits(want))
    if wrong.size:
        at = int(wrong[0])
        one, other = got.reshape(-1)[at], want.reshape(-1)[at]
        raise AssertionError(
            f"{what}: {wrong.size} of {got.size} differ, first at {at}: {one!r} ({int(bits(got)[at]):#x}), want "
            f"{other!r} ({int(bits(want)[at]):#x})"
        )


def within_bound(op: str, got: Array, inputs: Sequence[Array], wire: str | None, what: str) -> None:
    """Exact for integers, min and max; for sums, as near as one rounding of the wire per hop allows."""
    dtype = name_of(got)
    wire = None if wire == dtype or dtype not in FLOATS else wire
    if dtype not in FLOATS or (op in ("min", "max") and wire is None):
        check_bits(got, exact(op, inputs).astype(got.dtype), what)
        return
    size, travels = len(inputs), wire or dtype
    want = exact(op, inputs)
    wide = np.stack([np.abs(x.astype(np.longdouble)) for x in inputs])
    magnitude = {"min": wide.max(axis=0), "max": wide.max(axis=0), "prod": np.abs(want)}.get(op, wide.sum(axis=0))
    # A partial result is rounded to the wire at each of size - 1 hops, the operands once, and the result once; every
    # addition rounds in fp32 (fp64), which only counts where the wire is not narrower; the array's own type comes last.
    compute = _UNIT["float64" if dtype == "float64" else "float32"]
    units = (size + 1) * _UNIT[travels] + (size + 1) * compute + 2 * _UNIT[dtype]
    bound = magnitude * units * 1.01 + (size + 2) * (_TINY[travels] + _TINY[dtype])
    if op == "mean":
        bound = bound / size + np.abs(want) * 2 * _UNIT[travels] + _TINY[dtype]
    error = np.abs(got.astype(np.longdouble) - want)
    assert not np.isnan(got.astype(np.float64)).any(), f"{what}: not a number"
    worst = int(np.argmax(error - bound)) if error.size else 0
    assert np.all(error <= bound), (
        f"{what}: {int(np.sum(error > bound))} of {got.size} are off, first worst at {worst}: {got[worst]!r}, want "
        f"{want[worst]!r}, allowed {bound[worst]!r}"
    )
