"""Owns what ranks do with one described allreduce: inputs, poisoned memory, the call, and checks of its result."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import exact_sums as truth
import numpy as np
from exact_sums import Array

import gfkernels as gf

_GUARD = 5
_LARGE = 100_000
_PERIOD = 10_007
MEMORIES = ("ordinary", "registered", "mixed")


@dataclass(frozen=True)
class Case:
    """One allreduce.

    Attributes:
        op, dtype, wire: of the call.
        count: elements.
        memory: "registered" (all ranks' arrays from gfkernels.empty), "ordinary" (none), "mixed" (odd ranks').
        out: the result goes to another array.
        offset: elements between the start of the memory and the array, which then lies unaligned.
        wild: NaN, infinities and all that among the inputs.
        salt: other inputs.
    """

    op: str
    dtype: str
    count: int
    memory: str = "ordinary"
    wire: str | None = None
    out: bool = False
    offset: int = 0
    wild: bool = False
    salt: int = 0

    def __str__(self) -> str:
        extras = [self.memory, *([f"wire={self.wire}"] if self.wire else []), *(["out"] if self.out else [])]
        return f"{self.op} of {self.count} {self.dtype} ({', '.join(extras)}, offset {self.offset})"


class Done(NamedTuple):
    """How a call went: the plan that ran, how bytes travelled, and a hash of the result."""

    plan: str
    path: str
    digest: str


class Place:
    """An array inside poisoned memory, of gfkernels or of numpy."""

    def __init__(self, dtype: str, count: int, *, registered: bool, offset: int = 0) -> None:
        element, total = truth.numpy_dtype(dtype), offset + count + _GUARD
        self._memory = gf.empty(total, dtype) if registered else np.empty(total, element)
        self._memory.view(np.uint8)[:] = truth.POISON
        self.array: Array = self._memory[offset : offset + count]
        self._outside = (self._memory[:offset].view(np.uint8), self._memory[offset + count :].view(np.uint8))

    def check(self, what: str) -> None:
        """Nothing was written beside the array."""
        for outside in self._outside:
            assert (outside == truth.POISON).all(), f"{what}: wrote beside the array"


def is_registered(memory: str, rank: int) -> bool:
    """Whether a rank's arrays come from gfkernels.empty."""
    return memory == "registered" or (memory == "mixed" and rank % 2 == 1)


def perform(comm: gf.Communicator, seed: Sequence[int], case: Case) -> Done:
    """Makes the call and checks everything that one rank can."""
    key = [*seed, case.salt]
    # Large inputs repeat, so that the truth is small too; no segment or slice is a multiple of this prime.
    count = case.count if case.count <= _LARGE else _PERIOD
    inputs = [truth.values(key, case.dtype, count, q, op=case.op, wild=case.wild) for q in range(comm.size)]
    own, registered = np.resize(inputs[comm.rank], case.count), is_registered(case.memory, comm.rank)
    x = Place(case.dtype, case.count, registered=registered, offset=case.offset)
    x.array[...] = own
    out = Place(case.dtype, case.count, registered=registered, offset=2 * case.offset) if case.out else None
    got = comm.allreduce(x.array, case.op, out=None if out is None else out.array, wire=case.wire)
    what = f"rank {comm.rank} of {comm.size}: {case} [{info(comm)}]"
    assert got is (x.array if out is None else out.array), what
    x.check(what)
    if out is not None:
        out.check(what)
        truth.check_bits(x.array, own, f"{what}: x")
    wire = case.wire or (comm.config.wire if case.dtype in truth.FLOATS else None)
    plan, path = info(comm)
    if comm.size == 1:
        truth.check_bits(got, own, what)
    elif plan.startswith("direct"):
        truth.check_bits(got, np.resize(truth.documented(case.op, inputs, wire), case.count), what)
    else:
        if not case.wild:
            _check_bound(case.op, got, inputs, wire, what)
        nan = np.isnan(got.astype(np.float64)) if case.dtype in truth.FLOATS else np.zeros(case.count, bool)
        canonical = truth.rounded(np.full(1, np.nan, np.float32), case.dtype) if nan.any() else got[:0]
        assert (truth.bits(got)[nan] == truth.bits(canonical)).all() if nan.any() else True, f"{what}: odd NaN"
    return Done(plan, path, truth.digest(got))


def _check_bound(op: str, got: Array, inputs: Sequence[Array], wire: str | None, what: str) -> None:
    """Least and largest results over the repeats of the inputs, and the rest after the last whole repeat."""
    period = inputs[0].size
    whole = got.size // period * period if period else 0
    if whole:
        repeats = got[:whole].reshape(-1, period)
        for extreme in (repeats.min(axis=0), repeats.max(axis=0)):  # NaN is both
            truth.within_bound(op, extreme, inputs, wire, what)
    truth.within_bound(op, got[whole:], [x[: got.size - whole] for x in inputs], wire, f"{what}, the end")


def info(comm: gf.Communicator) -> tuple[str, str]:
    """Plan and path of the last call."""
    last = comm.last_call
    return ("alone", "alone") if last is None else (last.plan_name, last.path)


def run_cases(seed: int, cases: Sequence[Case], times: int = 1) -> list[Done]:
    """All of them, in order, each `times` times with the same bits."""
    comm = gf.init()
    done = []
    for case in cases:
        runs = {perform(comm, [seed], case) for _ in range(times)}
        assert len(runs) == 1, f"{case}: not the same from run to run: {runs}"
        done.append(runs.pop())
    return done


def every_op_and_dtype(
    counts: Sequence[int], turn: int, wire: str | None = None, dtypes: Sequence[str] = truth.DTYPES
) -> list[Case]:
    """Cases of every op and dtype, in memories, in and out of place, aligned and not, which take turns."""
    memories = itertools.islice(itertools.cycle(MEMORIES), turn, None)
    outs, offsets = itertools.cycle([False, True]), itertools.cycle([0, 1, 0, 0, 3])
    return [
        Case(op, dtype, count, next(memories), wire, next(outs), next(offsets), salt=turn)
        for dtype in dtypes
        if wire is None or dtype in truth.FLOATS
        for op in truth.ops_of(dtype)
        for count in counts
    ]


def sizes(config: gf.Config, size: int, itemsize: int) -> list[int]:
    """Awkward ones: around the number of ranks, a cache line, the inline limit, a segment."""
    near = [0, size, 64 // itemsize, config.inline_bytes // itemsize]
    if config.segment_bytes is not None:
        near += [config.segment_bytes // itemsize * k for k in (1, size)]
    awkward = {n + step for n in near for step in (-1, 0, 1)} | {2, 3, 97, 5003, 10_007}
    return sorted(n for n in awkward if n >= 0)


def run_sizes(seed: int, dtype: str, extra: Sequence[int]) -> list[tuple[int, str, Done]]:
    """Awkward sizes in every memory; `direct` gives the same bits in all of them."""
    comm = gf.init()
    found = []
    for number, count in enumerate([*sizes(comm.config, comm.size, truth.numpy_dtype(dtype).itemsize), *extra]):
        for memory in MEMORIES:
            case = Case("sum", dtype, count, memory, out=number % 3 == 1, offset=number % 2)
            found.append((count, memory, perform(comm, [seed], case)))
    return found


def same_on_all_ranks(answers: Sequence[Sequence[Any]]) -> None:
    """Every rank told the same about every call."""
    for number, told in enumerate(zip(*answers, strict=True)):
        assert len(set(told)) == 1, f"call {number}: ranks differ: {told}"
