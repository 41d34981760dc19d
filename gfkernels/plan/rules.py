"""Owns what can be said of plans row by row: bounds, types, places, and that signals sent are signals expected."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from gfkernels.plan.model import EVERYONE, Plan, PlanError
from gfkernels.types import N_BUFFERS, N_CHANNELS, Buffer, StepOp

WIRE_BUFFERS: Final = (int(Buffer.STAGE), int(Buffer.INLINE))
_NEEDS_SPANS: Final = (StepOp.COMBINE, StepOp.COPY, StepOp.PUT, StepOp.GET)


def fail(plan: Plan, row: int, reason: str) -> PlanError:
    """The error of one row, ready to raise."""
    op = StepOp(int(plan.steps["op"][row])).name if row < len(plan.steps) else "end"
    return PlanError(f"{plan.name} {plan.collective}: rank {plan.rank}, row {row} ({op}): {reason}")


def lengths(plan: Plan) -> dict[int, int]:
    """Elements of every buffer of one rank, by buffer id."""
    if plan.collective == "allreduce_many":
        counts = plan.parameter("counts")
        result = {int(Buffer.X) if i == 0 else N_BUFFERS + i - 1: n for i, n in enumerate(counts)}
    else:
        out = {"allgather": plan.size * plan.count, "reduce_scatter": plan.count // plan.size}
        result = {int(Buffer.X): plan.count, int(Buffer.OUT): out.get(plan.collective, plan.count)}
    result[int(Buffer.STAGE)] = plan.stage_elements
    result[int(Buffer.SCRATCH)] = plan.scratch_elements
    result[int(Buffer.INLINE)] = plan.inline_elements
    return result


def is_packed(plan: Plan, array: int) -> bool:
    """Whether the wire's dtype is not the array's, for one array."""
    packed = plan.parameter("packed", False)
    return bool(packed[array]) if isinstance(packed, tuple) else bool(packed)


def check_rows(plans: Sequence[Plan]) -> None:
    """Checks all ranks' rows.

    Raises:
        PlanError: naming rank, row and reason.
    """
    size = plans[0].size
    if len(plans) != size or [plan.rank for plan in plans] != list(range(size)):
        raise PlanError(f"{len(plans)} plans of ranks {[p.rank for p in plans]}: expected one of each of {size} ranks")
    if len({plan.hash for plan in plans}) != 1:
        raise PlanError(f"plans of different parameters: hashes {[plan.hash for plan in plans]}")
    sizes = [lengths(plan) for plan in plans]
    sent: npt.NDArray[np.int64] = np.zeros((size, size, N_CHANNELS), np.int64)
    for plan in plans:
        if plan.has_enter != plans[0].has_enter:
            raise PlanError(f"rank {plan.rank}: all ranks begin with ENTER or none does")
        _check_order(plan)
        _check_inline(plan)
        for row, step in enumerate(plan.steps.tolist()):
            _check_row(plan, row, step, sizes)
            op, peer, channel = step[0], step[2], step[3]
            if op == StepOp.SIGNAL or (op == StepOp.PUT and channel >= 0):
                for q in range(size) if peer == EVERYONE else (peer,):
                    if q != plan.rank:
                        sent[q, plan.rank, channel] += 1
    for plan in plans:
        wrong = np.argwhere(plan.expects != sent[plan.rank])
        if len(wrong):
            peer, channel = wrong[0].tolist()
            raise PlanError(
                f"{plan.name} {plan.collective}: rank {plan.rank} expects {plan.expects[peer, channel]} arrivals from "
                f"rank {peer} on channel {channel}, whose plan sends {sent[plan.rank, peer, channel]}"
            )


def _check_order(plan: Plan) -> None:
    starts = plan.lane_starts.tolist()
    first = plan.n_pre + int(plan.has_enter)
    if starts[0] != first or starts[-1] != len(plan.steps) or sorted(set(starts)) != starts:
        raise PlanError(f"rank {plan.rank}: lanes {starts} do not cover rows {first} to {len(plan.steps)}")
    if plan.n_pre and not plan.has_enter:
        raise PlanError(f"rank {plan.rank}: pre-steps without ENTER")
    for lane, (lo, hi) in enumerate(pairwise(starts)):
        if np.any(plan.steps["lane"][lo:hi] != plan.steps["lane"][lo]):
            raise PlanError(f"rank {plan.rank}: lane {lane} is not contiguous")
    entries = np.flatnonzero(plan.steps["op"] == StepOp.ENTER).tolist()
    if entries != ([plan.n_pre] if plan.has_enter else []):
        raise PlanError(f"rank {plan.rank}: ENTER at rows {entries}, expected at {plan.n_pre} only")


def _check_inline(plan: Plan) -> None:
    """Arrays of a list lie in INLINE without overlap, in bytes."""
    if plan.collective != "allreduce_many":
        return
    places = {}
    for row in range(plan.n_pre):
        step = plan.steps[row]
        span = plan.spans[int(step["dst"])]
        itemsize = plan.parameter("wires")[int(step["array"])]
        lo = int(span["offset"]) * itemsize
        places[lo] = (lo + int(span["count"]) * itemsize, row)
    end = 0
    for lo, (hi, row) in sorted(places.items()):
        if lo < end or hi > plan.inline_elements or lo % 64:
            raise fail(plan, row, f"bytes {lo} to {hi} of INLINE: expected a multiple of 64 from {end} on")
        end = hi


def _check_row(plan: Plan, row: int, step: tuple[int, ...], sizes: list[dict[int, int]]) -> None:
    op, _, peer, channel, value, count, _, src, n_src_wire, n_src_array, dst, n_dst_wire, n_dst_array, _, array, _ = (
        step
    )
    n_src, n_dst = n_src_wire + n_src_array, n_dst_wire + n_dst_array
    if op in (StepOp.SIGNAL, StepOp.WAIT, StepOp.PUT, StepOp.GET):
        everyone = peer == EVERYONE and op in (StepOp.SIGNAL, StepOp.WAIT)
        if not everyone and (not 0 <= peer < plan.size or peer == plan.rank):
            raise fail(plan, row, f"peer {peer} is not another rank")
        low = 0 if op in (StepOp.SIGNAL, StepOp.WAIT) else -1
        if not low <= channel < N_CHANNELS:
            raise fail(plan, row, f"channel {channel}")
    if op == StepOp.WAIT:
        for q in range(plan.size) if peer == EVERYONE else (peer,):
            if q != plan.rank and not 0 <= value <= plan.expects[q, channel]:
                raise fail(plan, row, f"waits for {value} arrivals of rank {q}, which sends {plan.expects[q, channel]}")
    if op not in _NEEDS_SPANS:
        return
    if count < 1:
        raise fail(plan, row, "moves nothing")
    if n_src < 1 or n_dst < 1 or (op != StepOp.COMBINE and (n_src != 1 or n_dst != 1)):
        raise fail(plan, row, f"{n_src} sources and {n_dst} destinations")
    sources = [tuple(map(int, s)) for s in plan.spans[src : src + n_src].tolist()]
    targets = [tuple(map(int, s)) for s in plan.spans[dst : dst + n_dst].tolist()]
    if len(sources) != n_src or len(targets) != n_dst:
        raise fail(plan, row, "spans beyond the table")
    packed = is_packed(plan, array)
    for index, (rank, buffer, offset, n) in enumerate(sources + targets):
        limit = sizes[rank].get(buffer, 0) if 0 <= rank < plan.size else 0
        if n != count or offset < 0 or offset + n > limit:
            raise fail(plan, row, f"span {(rank, buffer, offset, n)} of {limit} elements, count {count}")
        if rank != plan.rank and buffer == Buffer.SCRATCH:
            raise fail(plan, row, "reaches for a peer's private memory")
        if op == StepOp.COMBINE:
            wire = index < n_src_wire or n_src <= index < n_src + n_dst_wire
            if wire != (packed and buffer in WIRE_BUFFERS):
                raise fail(plan, row, f"span of buffer {buffer} listed as {'wire' if wire else 'array'}-typed")
    if op in (StepOp.COMBINE, StepOp.COPY):
        if not plan.has_enter and any(span[0] != plan.rank for span in sources + targets):
            raise fail(plan, row, "works on a peer's memory, but without ENTER nothing is mapped")
    else:
        far, near = (targets, sources) if op == StepOp.PUT else (sources, targets)
        if far[0][0] != peer or near[0][0] != plan.rank:
            raise fail(plan, row, f"moves between ranks {near[0][0]} and {far[0][0]}, expected {plan.rank} and {peer}")
    if op != StepOp.COMBINE and packed and (sources[0][1] in WIRE_BUFFERS) != (targets[0][1] in WIRE_BUFFERS):
        raise fail(plan, row, "copies bytes between the wire's dtype and the array's")
    for a_index, a in enumerate(targets):
        for b in sources + targets[a_index + 1 :]:
            overlap = a[:2] == b[:2] and abs(a[2] - b[2]) < count
            if overlap and not (a == b and b in sources and op == StepOp.COMBINE):
                raise fail(plan, row, f"spans {a} and {b} overlap")
