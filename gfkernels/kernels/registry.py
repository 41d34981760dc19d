"""Owns which reductions exist, and the address of the compiled function of each, made or loaded on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from gfkernels.errors import UsageError
from gfkernels.kernels import objects
from gfkernels.kernels.elements import Variant
from gfkernels.kernels.emitter import emit
from gfkernels.types import DTYPES, DType, ReduceOp

Key = tuple[ReduceOp, DType, "DType | None"]
"""What `combine` is asked for: op, dtype of the array, dtype on the wire (None: every span is array-typed).

A wire dtype equal to the array's means that spans still come in two kinds: a mean of 16-bit floats scales contributions
before they travel, and must not scale what has travelled again."""

WIRES: Final = ("float16", "bfloat16")
"""The dtypes that may travel instead of the array's."""

_lock: Final = threading.Lock()
_addresses: Final[dict[Variant, int]] = {}


def check(op: ReduceOp, dtype: DType, wire: DType | None = None) -> None:
    """Refuses combinations that have no meaning.

    Raises:
        UsageError: mean of integers; sum, prod or mean of bool; a wire dtype that is not a 16-bit float, or for an
            array that is not of floats.
    """
    if dtype.name not in DTYPES:
        raise UsageError(f"dtype {dtype.name!r} cannot be reduced. Use one of: {', '.join(DTYPES)}")
    if dtype.kind == "b" and op not in (ReduceOp.MIN, ReduceOp.MAX):
        raise UsageError(
            f'op="{op.label}" of bool arrays has no agreed meaning. Use op="max" for any, op="min" for all, or convert '
            "the array to an integer dtype to count"
        )
    if op == ReduceOp.MEAN and dtype.kind != "f":
        raise UsageError(
            f'op="mean" of {dtype.name} arrays would have to round. Use op="sum" and divide, or convert the array to a '
            "float dtype"
        )
    if wire is None or wire.name == dtype.name:
        return
    if wire.name not in WIRES:
        raise UsageError(f"wire={wire.name!r} is not supported. Use wire=None, {' or '.join(map(repr, WIRES))}")
    if dtype.kind != "f":
        raise UsageError(
            f"wire={wire.name!r} cannot carry {dtype.name} arrays without loss of whole numbers. Use wire=None"
        )


def _variant(op: ReduceOp, dtype: DType, wire: DType | None) -> Variant:
    check(op, dtype, wire)
    return Variant(ReduceOp(op), dtype, wire)


def combine(op: ReduceOp, dtype: DType, wire: DType | None = None) -> int:
    """The address of the C function that does COMBINE for these types.

    `int64 combine(int64 pointers, int64 counts, int64 n, int64 args)`, where `pointers` addresses int64[…] addresses
    (wire sources, array sources, wire destinations, array destinations); `counts` addresses int64[5] (how many of each,
    flags); `n` is the number of elements; `args` addresses float64[2] (prescale, divisor), read for MEAN only. It
    returns 0, touches no Python object, and needs addresses aligned to the itemsize only. There is at least one source.

    Compiled at most once per process and kept on disk; safe to call from several threads. The address stays valid for
    the life of the process.

    Raises:
        UsageError: see `check`.
    """
    variant = _variant(op, dtype, wire)
    address = _addresses.get(variant)
    if address is None:
        with _lock:
            address = _addresses.get(variant)
            if address is None:
                address = _addresses[variant] = _load(variant)
    return address


def is_cached(op: ReduceOp, dtype: DType, wire: DType | None = None) -> bool:
    """Whether `combine` would not have to compile."""
    variant = _variant(op, dtype, wire)
    return variant in _addresses or objects.read_cached(variant.name) is not None


def prepare(keys: Iterable[Key]) -> None:
    """Compiles (under the host's lock) or loads every kernel named, so that later calls of `combine` are look-ups."""
    keys = list(keys)
    if not all(is_cached(*key) for key in keys):
        with objects.compile_lock():
            for key in keys:
                combine(*key)
    for key in keys:
        combine(*key)


def _load(variant: Variant) -> int:
    code = objects.read_cached(variant.name)
    if code is None:
        code = objects.compile_object(emit(variant, objects.triple(), objects.native_half()))
        objects.write_cached(variant.name, code)
    return objects.load_object(code, variant.name)
