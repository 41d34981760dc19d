"""Owns when each row of a plan would run at unit cost: what pictures and tables of a plan show.

A full segment costs 1 per row that moves or reduces it, a shorter one its share; signals take no time; a message
arrives `LATENCY` after it was sent. Lanes run side by side.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from gfkernels.plan.model import EVERYONE, Plan, PlanError
from gfkernels.types import Buffer, StepOp

LATENCY: Final = 0.25
_LEAST: Final = 0.2
"""Shortest bar that can still be seen."""
_COST: Final = {StepOp.COMBINE: 1.0, StepOp.COPY: 1.0, StepOp.PUT: 1.0, StepOp.GET: 1.0}


@dataclass(frozen=True)
class Bar:
    """One row of one rank in time.

    Attributes:
        rank, lane, row: which row.
        op: what it does.
        start, end: when, in unit costs; a WAIT lasts while it waits.
        segment: of the pipeline.
        part: the number people see, `Numbering` says of what.
        peer: the other rank, or -1.
        count: elements.
    """

    rank: int
    lane: int
    row: int
    op: StepOp
    start: float
    end: float
    segment: int
    part: int
    peer: int
    count: int


@dataclass(frozen=True)
class Numbering:
    """What tells the pieces of a plan apart, for colours and labels.

    Attributes:
        word: what the numbers count: "segment", "round", "block", "array" or "chunk".
        parts: per rank, a number for each row.
    """

    word: str
    parts: list[npt.NDArray[np.int64]]

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> Numbering:
        """Segments where there are several, else the chunks that an array is cut into."""
        segments, arrays = (
            np.unique(np.concatenate([plan.steps[name][_moves(plan)] for plan in plans]))
            for name in ("segment", "array")
        )
        if len(arrays) > 1:
            return cls("array", [plan.steps["array"] for plan in plans])
        if len(segments) > 1:
            pulls = plans[0].collective == "allgather" and plans[0].name != "direct.staged"
            word = "block" if pulls and plans[0].name.startswith("direct") else "segment"
            word = "round" if plans[0].name == "recursive_doubling" else word
            return cls(word, [plan.steps["segment"] for plan in plans])
        places = [_chunks(plan) for plan in plans]
        known = sorted({place for chunks in places for place in chunks.tolist()})
        return cls("chunk", [np.searchsorted(np.array(known or [0]), chunks) for chunks in places])


def _moves(plan: Plan) -> npt.NDArray[np.bool_]:
    return np.asarray(plan.steps["n_dst_wire"] + plan.steps["n_dst_array"] > 0)


def _chunks(plan: Plan) -> npt.NDArray[np.int64]:
    """Where in the whole array each row works; staged data are followed from where they were put in."""
    whole = {int(Buffer.OUT)} if plan.collective == "allgather" else {int(Buffer.X)}
    if plan.collective == "allreduce":
        whole = {int(Buffer.X), int(Buffer.OUT)}
    spans, staged = plan.spans.tolist(), dict[int, int]()
    result = np.zeros(len(plan.steps), np.int64)
    last = 0
    for row, step in enumerate(plan.steps.tolist()):
        n_src, n_dst = step[8] + step[9], step[11] + step[12]
        touched = spans[step[7] : step[7] + n_src] + spans[step[10] : step[10] + n_dst] if n_dst else []
        at = next((offset for _, buffer, offset, _ in touched if buffer in whole), None)
        if at is None:
            at = next((staged[s[2]] for s in touched if s[:2] == (plan.rank, Buffer.STAGE) and s[2] in staged), last)
        for rank, buffer, offset, _ in touched:
            if rank == plan.rank and buffer == Buffer.STAGE:
                staged[offset] = at
        result[row] = last = at
    return result


def timeline(plans: Sequence[Plan], *, until: float = math.inf) -> list[Bar]:
    """All ranks' rows in time.

    Args:
        plans: one per rank.
        until: rows that would start later are left out, and rows that wait for them.

    Raises:
        PlanError: the plans deadlock.
    """
    size = len(plans)
    longest = max([int(plan.steps["count"].max(initial=0)) for plan in plans] + [1])
    now = [dict.fromkeys(range(max(1, plan.n_lanes)), 0.0) for plan in plans]
    arrivals: dict[tuple[int, int, int], list[float]] = {}
    entered: dict[int, float] = {}
    bars: list[Bar] = []
    places = [_places(plan) for plan in plans]
    parts = Numbering.of(plans).parts

    def step(plan: Plan, lane: int, row: int) -> bool:
        rank, item = plan.rank, plan.steps[row]
        op, peer, channel, count = StepOp(int(item["op"])), int(item["peer"]), int(item["channel"]), int(item["count"])
        start = now[rank][lane]
        if start > until:
            return False
        end = start
        if op == StepOp.ENTER:
            entered.setdefault(rank, start)
            if len(entered) < size:
                return False
            end = max(entered.values()) + LATENCY
        elif op == StepOp.WAIT:
            value = int(item["value"])
            for q in range(size) if peer == EVERYONE else (peer,):
                if q == rank or value == 0:
                    continue
                come = arrivals.get((q, rank, channel), [])
                if len(come) < value:
                    return False
                end = max(end, come[value - 1])
        elif op in _COST:
            end = start + max(_LEAST, _COST[op] * count / longest)
        if op == StepOp.SIGNAL or (op == StepOp.PUT and channel >= 0):
            for q in range(size) if peer == EVERYONE else (peer,):
                if q != rank:
                    insort(arrivals.setdefault((rank, q, channel), []), end + LATENCY)
        now[rank][lane] = end
        bars.append(Bar(rank, lane, row, op, start, end, int(item["segment"]), int(parts[rank][row]), peer, count))
        return True

    moved = True
    while moved:
        moved = False
        for plan in plans:
            for lane, place in enumerate(places[plan.rank]):
                if lane > 0 and lane < plan.n_lanes and place[0] == plan.lane_starts[lane]:
                    first = places[plan.rank][0]
                    if first[0] < plan.n_pre + int(plan.has_enter):
                        continue
                    if plan.has_enter:
                        now[plan.rank][lane] = max(now[plan.rank][lane], _entry_end(bars, plan.rank))
                while place[0] < place[1] and step(plan, lane, place[0]):
                    place[0] += 1
                    moved = True
    for plan in plans:
        for row, end_row in places[plan.rank]:
            if row < end_row and math.isinf(until):
                raise PlanError(f"{plan.name} {plan.collective}: rank {plan.rank}, row {row}: deadlock")
    return bars


def _places(plan: Plan) -> list[list[int]]:
    """[next row, end] of every lane; pre-steps and ENTER come first in lane 0."""
    starts = plan.lane_starts.tolist()
    if plan.n_lanes == 0:
        return [[0, starts[0]]]
    return [[0 if lane == 0 else starts[lane], starts[lane + 1]] for lane in range(plan.n_lanes)]


def _entry_end(bars: Sequence[Bar], rank: int) -> float:
    return next(bar.end for bar in bars if bar.rank == rank and bar.op == StepOp.ENTER)


def span(bars: Sequence[Bar]) -> float:
    """Time of the whole plan."""
    return float(np.max([bar.end for bar in bars], initial=1.0))
