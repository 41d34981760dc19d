"""Owns when each row of a plan would run at unit cost: what pictures and tables of a plan show.

A full segment costs 1 per row that moves or reduces it, a shorter one its share; signals take no time; a message
arrives `LATENCY` after it was sent. Lanes run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gfkernels.plan.model import EVERYONE, Plan, PlanError
from gfkernels.types import StepOp

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
    peer: int
    count: int


def timeline(plans: Sequence[Plan]) -> list[Bar]:
    """All ranks' rows in time.

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

    def step(plan: Plan, lane: int, row: int) -> bool:
        rank, item = plan.rank, plan.steps[row]
        op, peer, channel, count = StepOp(int(item["op"])), int(item["peer"]), int(item["channel"]), int(item["count"])
        start = now[rank][lane]
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
                end = max(end, sorted(come)[value - 1])
        elif op in _COST:
            end = start + max(_LEAST, _COST[op] * count / longest)
        if op == StepOp.SIGNAL or (op == StepOp.PUT and channel >= 0):
            for q in range(size) if peer == EVERYONE else (peer,):
                if q != rank:
                    arrivals.setdefault((rank, q, channel), []).append(end + LATENCY)
        now[rank][lane] = end
        bars.append(Bar(rank, lane, row, op, start, end, int(item["segment"]), peer, count))
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
            if row < end_row:
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
