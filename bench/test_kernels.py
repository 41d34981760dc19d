"""Times the host kernels with pytest-benchmark: `python -m pytest bench/test_kernels.py --benchmark-json=kernels.json`.

A round repeats the call until 4 MiB have moved; the `extra_info` of the JSON has `us_per_call`, `GB_per_s` and, for the
two-rank cases, `ratio_to_fp32_sum`: time per byte against the fp32 sum in the same memory, measured in turns.
"""

from __future__ import annotations

import time
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


_call4: Any = call4  # an intrinsic's type shows its typing context as a parameter


@njit
def repeat(function: int, pointers: int, counts: int, n: int, args: int, times: int) -> int:
    """Calls a kernel from compiled code, so that Python's call is not what is measured."""
    status = 0
    for _ in range(times):
        status += _call4(function, pointers, counts, n, args)
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


class _Call:
    """A kernel, its operands, and how often a round repeats it."""

    def __init__(self, address: int, spans: list[Any], counts: list[int], n: int, divisor: float = 1.0) -> None:
        self.nbytes_moved = sum(span.nbytes for span in spans)
        self._kept = (
            np.array([span.ctypes.data for span in spans], np.int64),
            np.array(counts, np.int64),
            np.array([1.0, divisor]),
            spans,
        )
        pointers, numbers, args, _ = self._kept
        self.times = max(1, (1 << 22) // self.nbytes_moved)
        self.arguments = (address, pointers.ctypes.data, numbers.ctypes.data, n, args.ctypes.data, self.times)
        repeat(*self.arguments)

    def best_s(self, rounds: int) -> float:
        """Seconds of one call, the best of several rounds."""
        best = float("inf")
        for _ in range(rounds):
            start = time.perf_counter()
            repeat(*self.arguments)
            best = min(best, (time.perf_counter() - start) / self.times)
        return best


def _measure(benchmark: Any, call: _Call) -> None:
    status = benchmark.pedantic(repeat, args=call.arguments, rounds=15, warmup_rounds=1)
    assert status == 0
    if benchmark.stats:  # none with --benchmark-disable
        seconds = benchmark.stats.stats.min / call.times
        benchmark.extra_info["us_per_call"] = seconds * 1e6
        benchmark.extra_info["GB_per_s"] = call.nbytes_moved / seconds / 1e9


@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("op", "dtype"), _supported(), ids=[f"{op.label}-{dtype.name}" for op, dtype in _supported()])
def test_two_ranks_in_place(benchmark: Any, op: ReduceOp, dtype: DType, nbytes: int) -> None:
    """What the owner of a slice does at N=2 in registered memory: reads two spans, writes both."""
    spans = [_numbers(dtype, nbytes) for _ in range(2)]
    flags = (RAW_SOURCES | FINAL) if op == ReduceOp.MEAN else 0
    counts = [0, 2, 0, 2, flags]
    call = _Call(combine(op, dtype), [*spans, *spans], counts, nbytes // dtype.itemsize, 2.0 if flags else 1.0)
    _measure(benchmark, call)
    if not benchmark.stats:
        return
    # In the same memory, since the places of its pages decide much of the time.
    views = [span.view(np.float32) for span in spans]
    fp32 = _Call(combine(ReduceOp.SUM, DTYPES["float32"]), [*views, *views], [0, 2, 0, 2, 0], nbytes // 4)
    times = []
    for _ in range(15):
        seconds = []
        for measured, arrays in ((call, spans), (fp32, views)):
            for array in arrays:
                array.fill(1)
            seconds.append(measured.best_s(1))
        times.append(seconds)
    best, best_fp32 = (min(column) for column in zip(*times, strict=True))
    benchmark.extra_info["ratio_to_fp32_sum"] = best / best_fp32


@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
@pytest.mark.parametrize("nbytes", SIZES.values(), ids=SIZES)
def test_fp32_sum_of_several_ranks(benchmark: Any, nbytes: int, ranks: int) -> None:
    """The loop over sources and destinations costs nothing at other numbers of ranks."""
    dtype = DTYPES["float32"]
    spans = [_numbers(dtype, nbytes) for _ in range(ranks)]
    counts = [0, ranks, 0, ranks, 0]
    _measure(benchmark, _Call(combine(ReduceOp.SUM, dtype), [*spans, *spans], counts, nbytes // dtype.itemsize))


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
    _measure(benchmark, _Call(combine(ReduceOp.SUM, dtype, wire), spans, counts, n))
