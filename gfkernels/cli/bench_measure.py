"""Owns measuring: verify first, then interleaved rounds of single calls, then calls in a row."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import gfkernels as gf
from gfkernels.cli.bench_case import Case, Data, digest, neutral, poison
from gfkernels.cli.bench_subjects import Refused, Subject

_ROUNDS: Final = 5
_BUDGET_S: Final = 0.3
_FEWEST: Final = 10
_MOST: Final = 500
_PATIENCE: Final = 3.0
_LOOP_BUDGET_S: Final = 0.15
_LOOP_FEWEST: Final = 3
_LOOP_MOST: Final = 5000

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        iters: single calls per row; 0: as many as take 0.3 s, 10 to 500.
        warmup: calls before them.
        check: verify results.
        loop: also time calls in a row.
    """

    iters: int = 0
    warmup: int = 3
    check: bool = True
    loop: bool = True


@dataclass(frozen=True)
class Row:
    """What one subject did with one case, on all ranks together.

    Attributes:
        case: what was called.
        by: the subject's name.
        is_peer: not ours.
        times_us: per call, the longest of the ranks.
        loop_us: per call, of many in a row; None where that was not measured.
        wrong: elements, over all ranks, that are not what they must be; None where that was not checked.
        plan, plan_hash: what ours followed.
        path: how ours reached the peers' memory: "registered", "cma", "staged", "inline", "verbs" or "tcp".
    """

    case: Case
    by: str
    is_peer: bool
    times_us: Array
    loop_us: float | None
    wrong: int | None
    plan: str = ""
    plan_hash: str = ""
    path: str = ""

    @property
    def median_us(self) -> float:
        """The time that the table shows."""
        return float(np.median(self.times_us))

    @property
    def algbw(self) -> float:
        """GB/s: bytes of the larger array over the time."""
        return self.case.nbytes / (self.median_us * 1e3)

    @property
    def busbw(self) -> float:
        """GB/s as the hardware sees it, comparable between numbers of ranks."""
        return self.algbw * self.case.bus_factor


@dataclass
class _Lane:
    """One subject while a case is measured."""

    subject: Subject
    source: Array
    target: Array
    call: Callable[[], Any]
    wrong: int | None = None
    times: list[float] = field(default_factory=list)
    iters: int = 0
    loop_us: float | None = None
    plan: tuple[str, str, str] = ("", "", "")


class Bench:
    """Measures cases on a communicator; every rank makes one and calls it alike.

    Attributes:
        comm: the communicator.
        refusals: by subject, why it was not measured.
        names: of the subjects.
    """

    def __init__(self, comm: gf.Communicator, subjects: Sequence[Subject], effort: Effort, seed: int = 1) -> None:
        self.comm = comm
        self.refusals: dict[str, str] = {}
        self.names = [subject.name for subject in subjects]
        self._subjects, self._effort, self._seed = list(subjects), effort, seed
        # A reduction of one number returns once all ranks have come, and at nearly the same time on all.
        self._meet = comm.plan_allreduce(np.zeros(1, np.int32))

    def measure(self, case: Case) -> list[Row]:
        """The rows of a case, one per subject that can do it."""
        lanes = [lane for subject in self._subjects if (lane := self._open(subject, case)) is not None]
        data = [self._fresh(case) for _ in lanes]
        try:
            with _undisturbed():
                self._prepare(case, lanes, data)
                self._rounds(case, lanes, data)
                if self._effort.loop:
                    self._loops(case, lanes)
            return [self._row(case, lane) for lane in lanes]
        finally:
            for lane in lanes:
                lane.subject.close()

    def _open(self, subject: Subject, case: Case) -> _Lane | None:
        try:
            return _Lane(subject, *subject.open(case))
        except Refused as error:
            self.refusals.setdefault(subject.name, str(error))
            return None

    def _fresh(self, case: Case) -> Data | None:
        if case.collective == "barrier":
            return None
        # The same on all ranks: each knows what all others give.
        self._seed += 1
        return Data(case, self._seed)

    def _prepare(self, case: Case, lanes: list[_Lane], data: list[Data | None]) -> None:
        """Verifies, warms up, and finds how many calls fit the time."""
        effort = self._effort
        for lane, contents in zip(lanes, data, strict=True):
            seconds = 0.0
            for turn in range(max(2, 1 + effort.warmup)):
                seconds = self._one(lane, case, contents, first=turn == 0)
                lane.plan = lane.subject.plan()
                if effort.check and turn == 0:
                    lane.wrong = self._wrong(lane, case, contents)
            seconds = self._largest(seconds)
            fitting = int(_BUDGET_S / max(seconds, 1e-9))
            lane.iters = effort.iters or max(_FEWEST, min(_MOST, fitting))

    def _rounds(self, case: Case, lanes: list[_Lane], data: list[Data | None]) -> None:
        """Single calls in turns, A B then B A, so that what else the machine does meets all alike."""
        pairs = list(zip(lanes, data, strict=True))
        for turn in range(_ROUNDS):
            for lane, contents in pairs if turn % 2 == 0 else reversed(pairs):
                # The warm-up may have promised too much, where other programs take the cores by turns.
                if not self._effort.iters and turn and self._largest(sum(lane.times)) > _PATIENCE * _BUDGET_S:
                    continue
                calls = lane.iters * (turn + 1) // _ROUNDS - lane.iters * turn // _ROUNDS
                lane.times += [self._one(lane, case, contents) for _ in range(calls)]
        for lane, contents in pairs:
            again = self._wrong(lane, case, contents) if self._effort.check else None
            if again is not None:
                lane.wrong = max(lane.wrong or 0, again)

    def _loops(self, case: Case, lanes: list[_Lane]) -> None:
        """Calls in a row, in pieces that grow: their length cannot be known beforehand."""
        for lane in lanes:
            neutral(lane.source, case.op)
            call, total, calls, chunk = lane.call, 0.0, 0, _LOOP_FEWEST
            while total < _LOOP_BUDGET_S and calls < _LOOP_MOST:
                self._meet()
                start = time.perf_counter()
                for _ in range(chunk):
                    call()
                seconds = self._largest(time.perf_counter() - start)
                total, calls = total + seconds, calls + chunk
                chunk = min(2 * chunk, _LOOP_MOST)
            lane.loop_us = total / calls * 1e6

    def _one(self, lane: _Lane, case: Case, contents: Data | None, *, first: bool = False) -> float:
        if contents is not None:
            only_receives = case.collective == "broadcast" and case.rank != case.root
            if first and (only_receives or not case.in_place):
                poison(lane.target)
            if (first or case.in_place) and not only_receives:
                contents.fill(lane.source)
        call = lane.call
        self._meet()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def _wrong(self, lane: _Lane, case: Case, contents: Data | None) -> int | None:
        if contents is None:
            return None
        wrong = np.array([contents.wrong(lane.target, lane.source)], np.int64)
        if case.collective != "reduce_scatter" and not lane.subject.is_peer:
            # Rounding may hide it, but ranks that go on with different numbers drift apart. Only allreduces, which
            # every plan can do.
            bits = digest(lane.target)
            extremes = np.array([bits, -bits], np.int64)
            self.comm.allreduce(extremes, "max")
            if extremes[0] != -extremes[1]:
                wrong[0] = max(1, int(wrong[0]))
        self.comm.allreduce(wrong)
        return int(wrong[0])

    def _largest(self, seconds: float) -> float:
        value = np.array([seconds])
        self.comm.allreduce(value, "max")
        return float(value[0])

    def _row(self, case: Case, lane: _Lane) -> Row:
        times = np.array(lane.times)
        self.comm.allreduce(times, "max")
        name, is_peer = lane.subject.name, lane.subject.is_peer
        return Row(case, name, is_peer, times * 1e6, lane.loop_us, lane.wrong, *lane.plan)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Without Python's garbage collection, which would hit one call of one rank."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
