"""Times the host kernels with pytest-benchmark: seconds per call, and per byte against the fp32 sum of the same run.

python -m pytest bench/test_kernels.py --benchmark-columns=min,median --benchmark-group-by=param:nbytes
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gfkernels.errors import UsageError
from gfkernels.kernels import check, combine
from gfkernels.native.jit import njit
from gfkernels.native.memory import call4
from gfkernels.types import DTYPES, FINAL, RAW_SOURCES, DType, ReduceOp

SIZES = {"64K": 1 << 16, "1M": 1 << 20, "16M": 1 << 24}
WIRES = (DTYPES["float16"], DTYPES["bfloat16"])


@njit
def repeat(function: int, pointers: int, counts: int, n: int, args: int, times: int) -> int:
    """Calls a kernel from compiled code, so that Python's call is not what is measured."""
    status = 0
    for _ in range(times):
        status += call4(function, pointers, counts, n, args)
    return status


def _supported() -> list[tuple[ReduceOp, DType]]:
    found = []
    for dtype in DTYPES.values():
        for op in ReduceOp:
            try:
                check(op, dtype)
            except UsageError:
                continue
            found.append((op, dtype))
    return found


def _numbers(dtype: DType, nbytes: int) -> Any:
    # Ones: prod neither overflows nor becomes subnormal however often it is repeated in place.
    return np.ones(nbytes // dtype.itemsize, dtype.numpy)


def _measure(
    benchmark: Any, address: int, spans: list[Any], counts: list[int], n: int, nbytes_moved: int, divisor: float = 1.0
) -> None:
    pointers = np.array([span.ctypes.data for span in spans], np.int64)
    numbers = np.array(counts, np.int64)
    args = np.array([1.0, divisor])
    times = max(1, (1 << 22) // nbytes_moved)
    call = (address, pointers.ctypes.data, numbers.ctypes.data, n, args.ctypes.data)
    repeat(*call, 1)
    result = benchmark.pedantic(repeat, args=(*call, times), rounds=15, warmup_rounds=1)
    assert result == 0
    if benchmark.stats:  # none with --benchmark-disable
        benchmark.extra_info["us_per_call"] = benchmark.stats.stats.min / times * 1e6
        benchmark.extra_info["GB_per_s"] = nbytes_moved * times / benchmark.stats.stats.min / 1e9


@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("op", "dtype"), _supported(), ids=[f"{op.label}-{dtype.name}" for op, dtype in _supported()])
def test_two_ranks_in_place(benchmark: Any, op: ReduceOp, dtype: DType, nbytes: int) -> None:
    """What the owner of a slice does at N=2 in registered memory: reads two spans, writes both."""
    spans = [_numbers(dtype, nbytes) for _ in range(2)]
    flags = (RAW_SOURCES | FINAL) if op == ReduceOp.MEAN else 0
    _measure(
        benchmark,
        combine(op, dtype),
        [*spans, *spans],
        [0, 2, 0, 2, flags],
        nbytes // dtype.itemsize,
        4 * nbytes,
        2.0 if flags else 1.0,
    )


@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES)
def test_fp32_sum_of_several_ranks(benchmark: Any, nbytes: int, ranks: int) -> None:
    """The loop over sources and destinations costs nothing at other numbers of ranks."""
    dtype = DTYPES["float32"]
    spans = [_numbers(dtype, nbytes) for _ in range(ranks)]
    _measure(
        benchmark,
        combine(ReduceOp.SUM, dtype),
        [*spans, *spans],
        [0, ranks, 0, ranks, 0],
        nbytes // dtype.itemsize,
        2 * ranks * nbytes,
    )


@pytest.mark.parametrize("wire", WIRES, ids=[wire.name for wire in WIRES])
@pytest.mark.parametrize("step", ["pack", "unpack", "ring"])
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES)
def test_fp32_with_a_narrow_wire(benchmark: Any, nbytes: int, step: str, wire: DType) -> None:
    """pack: array to wire; unpack: back; ring: what arrived plus our own, to the wire and to the array."""
    dtype = DTYPES["float32"]
    n = nbytes // dtype.itemsize
    array = _numbers(dtype, nbytes)
    arrived, leaving = _numbers(wire, n * 2), _numbers(wire, n * 2)
    spans, counts = {
        "pack": ([array, leaving], [0, 1, 1, 0, 0]),
        "unpack": ([arrived, array], [1, 0, 0, 1, 0]),
        "ring": ([arrived, array, leaving, array], [1, 1, 1, 1, 0]),
    }[step]
    moved = sum(span.nbytes for span in spans)
    _measure(benchmark, combine(ReduceOp.SUM, dtype, wire), spans, counts, n, moved)
