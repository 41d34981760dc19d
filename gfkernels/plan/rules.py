"""Owns what can be said of plans row by row: bounds, types, places, and that signals sent are signals expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from gfkernels.plan.model import EVERYONE, Plan, PlanError
from gfkernels.types import N_BUFFERS, N_CHANNELS, Buffer, StepOp

WIRE_BUFFERS: Final = (int(Buffer.STAGE), int(Buffer.INLINE))
_PARTS: Final = ("n_src_wire", "n_src_array", "n_dst_wire", "n_dst_array")
_MOST_SPANS: Final = 4095
"""On each side of a row; four such numbers and an operation fit in 63 bits."""

Rows = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]


def fail(plan: Plan, row: int, reason: str) -> PlanError:
    """The error of one row, ready to raise."""
    number = int(plan.steps["op"][row]) if row < len(plan.steps) else -1
    op = StepOp(number).name if 0 <= number < len(StepOp) else "end" if row == len(plan.steps) else str(number)
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


def packed_flags(plan: Plan) -> npt.NDArray[np.bool_]:
    """`is_packed` of every array."""
    packed = plan.parameter("packed", False)
    return np.array(packed if isinstance(packed, tuple) else [packed], np.bool_)


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
    if len({plan.stage_elements for plan in plans}) != 1:
        # Calls take turns in STAGE; a rank places its peers' by the size of its own.
        raise PlanError(f"STAGE of {[plan.stage_elements for plan in plans]} elements by rank: expected equal sizes")
    n_buffers = 1 + max(buffer for plan in plans for buffer in lengths(plan))
    table: npt.NDArray[np.int64] = np.zeros((size, n_buffers), np.int64)
    for plan in plans:
        for buffer, n in lengths(plan).items():
            table[plan.rank, buffer] = n
    sent: npt.NDArray[np.int64] = np.zeros((size, size, N_CHANNELS), np.int64)
    for plan in plans:
        if plan.has_enter != plans[0].has_enter:
            raise PlanError(f"rank {plan.rank}: all ranks begin with ENTER or none does")
        _check_order(plan)
        _check_inline(plan)
        _check_plan(plan, table)
        op, peer, channel = plan.steps["op"], plan.steps["peer"], plan.steps["channel"]
        raising = (op == StepOp.SIGNAL) | ((op == StepOp.PUT) & (channel >= 0))
        to_one, to_all = raising & (peer >= 0), raising & (peer == EVERYONE)
        np.add.at(sent[:, plan.rank], (peer[to_one], channel[to_one]), 1)
        sent[np.arange(size) != plan.rank, plan.rank] += np.bincount(channel[to_all], minlength=N_CHANNELS)
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


def _require(plan: Plan, ok: Truths, reason: Callable[[int], str], rows: Rows | None = None) -> None:
    """Refuses the first row that is not ok.

    Args:
        plan: whose rows.
        ok: one truth per row (or per row of `rows`).
        reason: says what is wrong, given an index into `ok`.
        rows: the numbers of the rows, where `ok` is about some only.
    """
    bad = np.flatnonzero(~ok)
    if len(bad):
        raise fail(plan, int(bad[0] if rows is None else rows[bad[0]]), reason(int(bad[0])))


def _check_plan(plan: Plan, sizes: npt.NDArray[np.int64]) -> None:
    """All rows of one plan.

    Args:
        plan: whose.
        sizes: elements of every rank's buffers, [rank, buffer].
    """
    steps = plan.steps
    op, peer, channel, value = (steps[name] for name in ("op", "peer", "channel", "value"))
    _require(plan, (op >= 0) & (op < len(StepOp)), lambda i: f"no such operation {op[i]}")
    signalling = (op == StepOp.SIGNAL) | (op == StepOp.WAIT)
    remote = signalling | (op == StepOp.PUT) | (op == StepOp.GET)
    another = (peer >= 0) & (peer < plan.size) & (peer != plan.rank)
    everyone = signalling & (peer == EVERYONE)
    _require(plan, ~remote | another | everyone, lambda i: f"peer {peer[i]} is not another rank")
    low = np.where(signalling, 0, -1)
    _require(plan, ~remote | ((channel >= low) & (channel < N_CHANNELS)), lambda i: f"channel {channel[i]}")
    waits = np.flatnonzero(op == StepOp.WAIT)
    if len(waits):
        others = np.arange(plan.size) != plan.rank
        # From everyone comes what comes from the one that sends least.
        least = plan.expects[others].min(axis=0) if plan.size > 1 else plan.expects[0]
        whom, through, wants = peer[waits], channel[waits], value[waits]
        comes = np.where(whom == EVERYONE, least[through], plan.expects[whom, through])
        ok = (wants >= 0) & (wants <= comes)
        _require(plan, ok, partial(_waits_in_vain, wants, comes, whom), waits)
    moving = (op == StepOp.COMBINE) | (op == StepOp.COPY) | (op == StepOp.PUT) | (op == StepOp.GET)
    _require(plan, ~moving | (steps["count"] >= 1), lambda i: "moves nothing")
    parts = [steps[name] for name in _PARTS]
    for part in parts:
        _require(plan, ~moving | ((part >= 0) & (part <= _MOST_SPANS)), lambda i, n=part: f"{n[i]} spans")  # type: ignore[misc]
    # Rows of one form are checked together: plans have a handful of forms and many rows.
    form = op.copy()
    for part in parts:
        form = form * (_MOST_SPANS + 1) + part
    rows = np.flatnonzero(moving)
    for kind in np.unique(form[rows]):
        _check_form(plan, rows[form[rows] == kind], sizes)


def _waits_in_vain(value: Rows, comes: Rows, peer: Rows, i: int) -> str:
    whom = "every rank, one of" if peer[i] == EVERYONE else f"rank {peer[i]},"
    return f"waits for {value[i]} arrivals of {whom} which sends {comes[i]}"


def _check_form(plan: Plan, rows: Rows, sizes: npt.NDArray[np.int64]) -> None:
    """Rows of the same operation and numbers of spans."""
    steps = plan.steps[rows]
    op, n_src_wire, n_src_array, n_dst_wire, n_dst_array = (int(steps[name][0]) for name in ("op", *_PARTS))
    n_src, n_dst = n_src_wire + n_src_array, n_dst_wire + n_dst_array
    if n_src < 1 or n_dst < 1 or (op != StepOp.COMBINE and (n_src != 1 or n_dst != 1)):
        raise fail(plan, int(rows[0]), f"{n_src} sources and {n_dst} destinations")
    ends = ((steps["src"], n_src), (steps["dst"], n_dst))
    for first, n in ends:
        _require(plan, (first >= 0) & (first <= len(plan.spans) - n), lambda i: "spans beyond the table", rows)
    table = plan.spans.view(np.int64).reshape(-1, 4)
    spans = np.concatenate([table[first[:, None] + np.arange(n)] for first, n in ends], axis=1)
    rank, buffer, offset, count = (spans[:, :, i] for i in range(4))
    known = (rank >= 0) & (rank < plan.size) & (buffer >= 0) & (buffer < sizes.shape[1])
    limit = np.where(known, sizes[np.where(known, rank, 0), np.where(known, buffer, 0)], 0)
    within = (count == steps["count"][:, None]) & (offset >= 0) & (offset <= limit - count)
    _require(plan, within.all(axis=1), partial(_beyond, spans, limit, within, steps["count"]), rows)
    private = (rank != plan.rank) & (buffer == Buffer.SCRATCH)
    _require(plan, ~private.any(axis=1), lambda i: "reaches for a peer's private memory", rows)
    early = (rows < plan.n_pre)[:, None] & (buffer == Buffer.STAGE)
    _require(plan, ~early.any(axis=1), lambda i: "works on STAGE before ENTER, which says where in it", rows)
    arrays = steps["array"]
    flags = packed_flags(plan)
    _require(plan, (arrays >= 0) & (arrays < len(flags)), lambda i: f"array {arrays[i]} of {len(flags)}", rows)
    packed = flags[arrays]
    wired = np.isin(buffer, WIRE_BUFFERS)
    if op == StepOp.COMBINE:
        wire = np.repeat([True, False, True, False], [n_src_wire, n_src_array, n_dst_wire, n_dst_array])
        right = (packed[:, None] & wired) == wire
        _require(plan, right.all(axis=1), partial(_mistyped, buffer, right, wire), rows)
    else:
        alike = ~packed | (wired[:, 0] == wired[:, 1])
        _require(plan, alike, lambda i: "copies bytes between the wire's dtype and the array's", rows)
    if op in (StepOp.PUT, StepOp.GET):
        far, near = (rank[:, 1], rank[:, 0]) if op == StepOp.PUT else (rank[:, 0], rank[:, 1])
        text = partial(_misdirected, near, far, plan.rank, steps["peer"])
        _require(plan, (far == steps["peer"]) & (near == plan.rank), text, rows)
    elif not plan.has_enter:
        local = (rank == plan.rank).all(axis=1)
        _require(plan, local, lambda i: "works on a peer's memory, but without ENTER nothing is mapped", rows)
    pairs = [(a, b) for a in range(n_src, n_src + n_dst) for b in (*range(n_src), *range(a + 1, n_src + n_dst))]
    a, b = np.array(pairs, np.int64).T
    apart = abs(offset[:, a] - offset[:, b])
    overlap = (rank[:, a] == rank[:, b]) & (buffer[:, a] == buffer[:, b]) & (apart < steps["count"][:, None])
    if op == StepOp.COMBINE:
        # In place is allowed.
        overlap &= (apart != 0) | (b >= n_src)
    _require(plan, ~overlap.any(axis=1), partial(_overlapping, spans, overlap, pairs), rows)


def _beyond(spans: Rows, limit: Rows, within: Truths, count: Rows, i: int) -> str:
    k = int(np.argmin(within[i]))
    return f"span {tuple(spans[i, k].tolist())} of {limit[i, k]} elements, count {count[i]}"


def _mistyped(buffer: Rows, right: Truths, wire: Truths, i: int) -> str:
    k = int(np.argmin(right[i]))
    return f"span of buffer {buffer[i, k]} listed as {'wire' if wire[k] else 'array'}-typed"


def _misdirected(near: Rows, far: Rows, rank: int, peer: Rows, i: int) -> str:
    return f"moves between ranks {near[i]} and {far[i]}, expected {rank} and {peer[i]}"


def _overlapping(spans: Rows, overlap: Truths, pairs: list[tuple[int, int]], i: int) -> str:
    a, b = (tuple(spans[i, k].tolist()) for k in pairs[int(np.argmax(overlap[i]))])
    return f"spans {a} and {b} overlap"
