"""Owns the symbolic checker: runs all ranks' plans together, over several calls, on values that are sets of ranks.

Only signals, waits, ENTER and the order within a lane order anything. Arrivals on one counter must themselves be
ordered, so the order found does not depend on the interleaving that the checker happens to follow, and one run proves
all. Bytes of a PUT land some time between the row and the arrival that it raises; links of a lane to a peer keep order.
STAGE may be written by a PUT of a call which its owner has not begun; X and OUT may not (the transport holds payload
until the receiver's call begins).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gfkernels.plan.model import EVERYONE, Plan, PlanError
from gfkernels.plan.regions import Clock, RaceError, Region, Value
from gfkernels.plan.rules import check_rows, fail, lengths, packed_flags
from gfkernels.types import FINAL, N_BUFFERS, RAW_SOURCES, Buffer, StepOp

__all__ = ["PlanError", "check"]

# Looking up a member of an enumeration costs as much as a tenth of a row.
_ENTER, _COMBINE, _PUT = int(StepOp.ENTER), int(StepOp.COMBINE), int(StepOp.PUT)
_SIGNAL, _WAIT = int(StepOp.SIGNAL), int(StepOp.WAIT)
_INLINE = int(Buffer.INLINE)
_LANDS_ANYTIME = (int(Buffer.STAGE), int(Buffer.INLINE), int(Buffer.SCRATCH))


def check(plans: Sequence[Plan], *, calls: int = 3) -> None:
    """Proves the plans of all ranks right, also when they run `calls` times in a row.

    Proved: every element of the result holds every rank's contribution exactly once, scaled and divided once, in its
    place; conflicting accesses are ordered, across calls too; nothing is read before it is written; no deadlock; every
    signal is expected by its receiver; all spans are within their buffers.

    Args:
        plans: one per rank, in rank order.
        calls: how often they run.

    Raises:
        PlanError: naming rank, row and reason.
    """
    check_rows(plans)
    check_sequence([plans] * calls)


def check_sequence(calls: Sequence[Sequence[Plan]]) -> None:
    """The same for calls that follow different plans, each of which has passed `check_rows`."""
    _Run(calls).run()


class _Words:
    """A plan's rows and spans as tuples."""

    def __init__(self, plan: Plan) -> None:
        self.steps: list[tuple[int, ...]] = plan.steps.tolist()
        self.spans: list[tuple[int, ...]] = plan.spans.tolist()
        self.lengths = lengths(plan)
        # An unpacked ring has no scale to apply, and its partial sums are array-typed like its contributions.
        self.scales = [plan.name.startswith("direct") or packed for packed in packed_flags(plan).tolist()]


class _Run:
    def __init__(self, calls: Sequence[Sequence[Plan]]) -> None:
        self.calls = calls
        self.size = calls[0][0].size
        n_lanes = max(1, max(plan.n_lanes for plans in calls for plan in plans))
        links: set[tuple[int, int, int]] = set()
        for plans in calls:
            for plan in plans:
                puts = plan.steps[plan.steps["op"] == StepOp.PUT]
                links.update((plan.rank, int(lane), int(peer)) for lane, peer in set(puts[["lane", "peer"]].tolist()))
        self.n_lanes = n_lanes
        self.links = {link: self.size * n_lanes + i for i, link in enumerate(sorted(links))}
        width = self.size * n_lanes + len(links)
        self.clocks = [np.zeros(width, np.int64) for _ in range(width)]
        self.zero: Clock = np.zeros(width, np.int64)
        self.arrivals: dict[tuple[int, int, int], list[Clock]] = {}
        self.signallers: dict[tuple[int, int, int], tuple[int, Clock]] = {}
        self.bases = [np.zeros_like(calls[0][0].expects) for _ in range(self.size)]
        self.regions: dict[tuple[int, int, int], Region] = {}
        self.in_body = [False] * self.size
        self.begin_clocks: list[list[Clock]] = [[] for _ in range(self.size)]
        self.entered: dict[int, dict[int, Clock]] = {}
        self.call = [0] * self.size
        self.active: list[dict[int, tuple[int, int]]] = [{} for _ in range(self.size)]
        # Python's integers are several times as fast as numpy's records.
        self.words = {key: _Words(plan) for key, plan in {id(plan): plan for plans in calls for plan in plans}.items()}

    # -- the interleaving --------------------------------------------------------------------------------------

    def run(self) -> None:
        for rank in range(self.size):
            self._begin(rank)
        moved = True
        while moved:
            moved = False
            for rank in range(self.size):
                moved |= self._advance(rank)
        for rank in range(self.size):
            for row, _ in self.active[rank].values():
                step = self._plan(rank).steps[row]
                wants = f"rank {step['peer']}, channel {step['channel']}, value {step['value']}"
                raise fail(self._plan(rank), row, f"deadlock in call {self.call[rank]}: waits for ever for {wants}")

    def _plan(self, rank: int) -> Plan:
        return self.calls[self.call[rank]][rank]

    def _thread(self, rank: int, lane: int) -> int:
        return rank * self.n_lanes + lane

    def _begin(self, rank: int) -> None:
        """A rank begins its next call; its user has just filled X."""
        call, plan = self.call[rank], self._plan(rank)
        main = self._thread(rank, 0)
        clock = self.clocks[main]
        clock[main] += 1
        for buffer, n in self.words[id(plan)].lengths.items():
            region = self._region(rank, buffer, call, n)
            if buffer in _LANDS_ANYTIME:
                continue
            array = 0 if buffer < N_BUFFERS else buffer - N_BUFFERS + 1
            is_input = buffer == Buffer.X or buffer >= N_BUFFERS
            raw = Value(1 << rank, 0, call, array, scaled=False, final=False) if is_input else None
            try:
                region.write([(0, n, raw)], main, clock, f"the caller of rank {rank}, before call {call}")
            except RaceError as error:
                raise PlanError(f"{plan.name} {plan.collective}: rank {rank}, between calls: {error}") from None
        self.begin_clocks[rank].append(clock.copy())
        first = plan.n_pre + int(plan.has_enter)
        self.in_body[rank] = first == 0
        self.active[rank] = self._fork(rank) if self.in_body[rank] else {0: (0, first)}

    def _fork(self, rank: int) -> dict[int, tuple[int, int]]:
        plan, main = self._plan(rank), self._thread(rank, 0)
        starts = plan.lane_starts.tolist()
        lanes = {lane: (starts[lane], starts[lane + 1]) for lane in range(plan.n_lanes)}
        for lane in lanes:
            np.maximum(
                self.clocks[self._thread(rank, lane)], self.clocks[main], out=self.clocks[self._thread(rank, lane)]
            )
        return lanes

    def _advance(self, rank: int) -> bool:
        """Runs all lanes of a rank until each is done or has to wait; whether anything moved."""
        if self.call[rank] == len(self.calls):
            return False
        moved = False
        plan, lanes = self._plan(rank), self.active[rank]
        for lane in list(lanes):
            row, end = lanes[lane]
            while row < end and self._step(plan, rank, lane, row):
                row += 1
                moved = True
            lanes[lane] = (row, end)
            if row == end:
                del lanes[lane]
        if not lanes:
            self._next_phase(rank, plan)
            return True
        return moved

    def _next_phase(self, rank: int, plan: Plan) -> None:
        if not self.in_body[rank]:
            self.in_body[rank] = True
            self.active[rank] = self._fork(rank)
            return
        main = self._thread(rank, 0)
        for lane in range(plan.n_lanes):
            np.maximum(self.clocks[main], self.clocks[self._thread(rank, lane)], out=self.clocks[main])
        self._check_result(rank, plan)
        self.bases[rank] = self.bases[rank] + plan.expects
        self.call[rank] += 1
        if self.call[rank] < len(self.calls):
            self._begin(rank)
        else:
            self._leave(rank, plan)

    def _leave(self, rank: int, plan: Plan) -> None:
        """After the last call the caller may overwrite its arrays."""
        main = self._thread(rank, 0)
        self.clocks[main][main] += 1
        for buffer, n in self.words[id(plan)].lengths.items():
            if buffer not in _LANDS_ANYTIME:
                try:
                    region = self._region(rank, buffer, 0, n)
                    region.write([(0, n, None)], main, self.clocks[main], f"the caller of rank {rank}")
                except RaceError as error:
                    raise PlanError(f"{plan.name} {plan.collective}: rank {rank}, after the call: {error}") from None

    # -- rows --------------------------------------------------------------------------------------------------

    def _region(self, rank: int, buffer: int, call: int, length: int, array: int = 0) -> Region:
        # INLINE has two copies, used by turns. Arrays of a list may differ in itemsize, so each has offsets of its own
        # there; `check_rows` sees to it that their bytes do not overlap.
        key = (rank, buffer, 2 * array + call % 2 if buffer == _INLINE else 0)
        region = self.regions.get(key)
        if region is None:
            longest = max(self.words[id(plans[rank])].lengths.get(buffer, 0) for plans in self.calls)
            label = Buffer(buffer).name if buffer < N_BUFFERS else f"array {buffer - N_BUFFERS + 1}"
            region = self.regions[key] = Region(max(longest, length), f"{label} of rank {rank}")
        return region

    def _step(self, plan: Plan, rank: int, lane: int, row: int) -> bool:
        """Runs one row; False: it has to wait."""
        words = self.words[id(plan)]
        op, _, peer, channel, value = words.steps[row][:5]
        thread = self._thread(rank, lane)
        clock = self.clocks[thread]
        if op == _ENTER:
            return self._enter(rank, clock, thread)
        if op == _WAIT:
            return self._wait(rank, peer, channel, value, clock)
        if op == _PUT and self._is_held(words, rank, row, peer):
            return False
        clock[thread] += 1
        if op == _SIGNAL:
            for q in range(self.size) if peer == EVERYONE else (peer,):
                if q != rank:
                    self._arrive(plan, row, lane, q, channel, clock)
            return True
        try:
            self._move(plan, words, lane, row, clock, thread)
        except RaceError as error:
            raise fail(plan, row, f"call {self.call[rank]}: {error}") from None
        if op == _PUT and channel >= 0:
            self._arrive(plan, row, lane, peer, channel, clock)
        return True

    def _is_held(self, words: _Words, rank: int, row: int, peer: int) -> bool:
        buffer = words.spans[words.steps[row][10]][1]
        return buffer not in _LANDS_ANYTIME and len(self.begin_clocks[peer]) <= self.call[rank]

    def _enter(self, rank: int, clock: Clock, thread: int) -> bool:
        here = self.entered.setdefault(self.call[rank], {})
        if rank not in here:
            clock[thread] += 1
            here[rank] = clock.copy()
        if len(here) < self.size:
            return False
        for other in here.values():
            np.maximum(clock, other, out=clock)
        return True

    def _wait(self, rank: int, peer: int, channel: int, value: int, clock: Clock) -> bool:
        sources = [q for q in range(self.size) if q != rank] if peer == EVERYONE else [peer]
        needs = [(q, int(self.bases[rank][q, channel]) + value) for q in sources]
        if any(len(self.arrivals.get((q, rank, channel), ())) < n for q, n in needs):
            return False
        for q, n in needs:
            if n:
                np.maximum(clock, self.arrivals[q, rank, channel][n - 1], out=clock)
        return True

    def _arrive(self, plan: Plan, row: int, lane: int, peer: int, channel: int, clock: Clock) -> None:
        key = (plan.rank, peer, channel)
        other, before = self.signallers.get(key, (lane, clock))
        if other != lane and (before > clock).any():
            raise fail(plan, row, f"another lane may signal rank {peer} on channel {channel} at the same time")
        self.signallers[key] = lane, clock.copy()
        link = self.links.get((plan.rank, lane, peer))
        if link is not None:
            np.maximum(self.clocks[link], clock, out=self.clocks[link])
            clock = self.clocks[link]
        arrived = self.arrivals.setdefault(key, [])
        arrived.append(np.maximum(clock, arrived[-1]) if arrived else clock.copy())

    def _move(self, plan: Plan, words: _Words, lane: int, row: int, clock: Clock, thread: int) -> None:
        rank, call = plan.rank, self.call[plan.rank]
        where = f"rank {rank}, row {row} of call {call}"
        op, _, peer, _, _, count, _, src, n_wire, n_array, dst, n_dst_wire, n_dst_array, _, array, _ = words.steps[row]
        reads = []
        for q, buffer, offset, n in words.spans[src : src + n_wire + n_array]:
            region = self._region(q, buffer, call, offset + n, array)
            values = region.read(offset, offset + n, thread, clock, where)
            reads.append([(lo - offset, hi - offset, _moved(v, offset)) for lo, hi, v in values])
        result = _Merge(plan, words, row, call).merge(reads, n_wire, count) if op == _COMBINE else reads[0]
        targets = words.spans[dst : dst + n_dst_wire + n_dst_array]
        if op == _PUT:
            link = self.links[rank, lane, peer]
            np.maximum(self.clocks[link], clock, out=self.clocks[link])
            if not plan.has_enter and targets[0][1] not in _LANDS_ANYTIME:
                np.maximum(self.clocks[link], self.begin_clocks[peer][call], out=self.clocks[link])
            thread, clock = link, self.clocks[link]
            clock[link] += 1
        for q, buffer, offset, n in targets:
            region = self._region(q, buffer, call, offset + n, array)
            region.write([(lo + offset, hi + offset, _moved(v, -offset)) for lo, hi, v in result], thread, clock, where)

    def _check_result(self, rank: int, plan: Plan) -> None:
        everyone, call = (1 << self.size) - 1, self.call[rank]
        if plan.collective == "barrier":
            clock = self.clocks[self._thread(rank, 0)]
            for q, begun in enumerate(self.begin_clocks):
                if len(begun) <= call or (begun[call] > clock).any():
                    raise fail(plan, len(plan.steps), f"call {call}: leaves before rank {q} has come")
        for buffer, n in self.words[id(plan)].lengths.items():
            array = buffer - N_BUFFERS + 1 if buffer >= N_BUFFERS else 0
            if buffer in _LANDS_ANYTIME or n == 0:
                continue
            values = self._region(rank, buffer, call, n).values()
            name = self._region(rank, buffer, call, n).name
            for lo, hi, value in values:
                for at in sorted({lo, hi - 1}):
                    problem = _wrong(plan, buffer, at, value, everyone, call, array)
                    if problem:
                        raise fail(plan, len(plan.steps), f"call {call}: {name}[{lo}:{hi}] {problem}")


def _moved(value: Value | None, shift: int) -> Value | None:
    if value is None or shift == 0:
        return value
    return Value(value.ranks, value.shift + shift, value.call, value.array, value.scaled, value.final)


def _wrong(plan: Plan, buffer: int, at: int, value: Value | None, everyone: int, call: int, array: int) -> str:
    """What is wrong with element `at` of an array after the call; nothing: an empty text."""
    rank, size, count, kind = plan.rank, plan.size, plan.count, plan.collective
    ranks, index, reduced = 1 << rank, at, False
    if buffer == Buffer.OUT:
        if kind in ("broadcast", "barrier") or (kind == "allreduce" and not plan.parameter("out", False)):
            return ""
        if kind == "allgather":
            ranks, index = 1 << (at // count), at % count
        else:
            ranks, reduced = everyone, True
            index = at + rank * (count // size) if kind == "reduce_scatter" else at
    elif kind == "broadcast":
        ranks = 1 << int(plan.parameter("root"))
    elif kind == "allreduce_many" or (kind == "allreduce" and not plan.parameter("out", False)):
        ranks, reduced = everyone, True
    if value is None:
        return "was never written"
    if value.call != call:
        return f"holds a value of call {value.call}"
    if value.ranks != ranks or value.shift + at != index or value.array != array:
        return f"holds ranks {value.ranks:#b} at index {value.shift + at}, expected {ranks:#b} at {index}"
    if reduced and size > 1 and not value.final:
        return "was not completed (FINAL)"
    return ""


class _Merge:
    """A COMBINE on symbolic values."""

    def __init__(self, plan: Plan, words: _Words, row: int, call: int) -> None:
        self.plan, self.row, self.call = plan, row, call
        self.flags = words.steps[row][6]
        self.scales = words.scales[words.steps[row][14]]

    def merge(
        self, reads: list[list[tuple[int, int, Value | None]]], n_wire: int, count: int
    ) -> list[tuple[int, int, Value | None]]:
        cuts = sorted({0, count} | {lo for read in reads for lo, _, _ in read})
        cursors = [0] * len(reads)
        result: list[tuple[int, int, Value | None]] = []
        for lo, hi in pairwise(cuts):
            values = []
            for i, read in enumerate(reads):
                while read[cursors[i]][1] <= lo:
                    cursors[i] += 1
                values.append(read[cursors[i]][2])
            result.append((lo, hi, self._one(values, n_wire)))
        return result

    def _one(self, values: list[Value | None], n_wire: int) -> Value:
        ranks, first = 0, values[0]
        scaled = True
        for index, value in enumerate(values):
            if value is None or first is None:
                raise fail(self.plan, self.row, f"source {index} was never written")
            if (value.shift, value.call, value.array) != (first.shift, self.call, first.array):
                raise fail(self.plan, self.row, f"source {index} holds {value}, source 0 {first}")
            if value.ranks & ranks:
                raise fail(self.plan, self.row, f"adds the same contribution twice: {value.ranks:#b} to {ranks:#b}")
            raw = index >= n_wire and bool(self.flags & RAW_SOURCES)
            if raw and self.scales and value.scaled:
                raise fail(self.plan, self.row, f"scales source {index} twice")
            if len(values) > 1 and value.final:
                raise fail(self.plan, self.row, f"source {index} is complete already")
            scaled = scaled and (value.scaled or raw)
            ranks |= value.ranks
        assert first is not None
        final = bool(self.flags & FINAL)
        if final and (first.final or ranks != (1 << self.plan.size) - 1):
            raise fail(self.plan, self.row, f"divides although it holds ranks {ranks:#b}")
        if self.scales and not scaled and (final or len(values) > 1):
            raise fail(self.plan, self.row, "adds a contribution that was never scaled (RAW_SOURCES)")
        return Value(ranks, first.shift, self.call, first.array, scaled, final or first.final)
