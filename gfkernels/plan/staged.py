"""Owns the `direct` plans for arrays that no peer can reach: through bounded STAGE slots, as a software pipeline.

A tick packs segment t, reduces segment t - d and unpacks segment t - 2d; one signal per tick tells all peers how far
this rank has come, and every access is ordered by having waited for the signals of tick t - d. With K slots,
d = K // 3: slot reuse needs K >= 3d. Two phases need K >= 2d, and one slot more where the signal goes out before the
tick's last reads. The last reads of a call are ordered before the next call's first writes by that call's ENTER.
"""

from __future__ import annotations

from gfkernels.plan.model import EVERYONE, Plan, PlanBuilder, PlanError, block_of, pieces, slices
from gfkernels.types import FINAL, RAW_SOURCES, Buffer

STAGE, X, OUT = int(Buffer.STAGE), int(Buffer.X), int(Buffer.OUT)


def _depth(slots: int, stages: int, segment_elements: int, *, extra: int = 0) -> int:
    if slots < stages + extra:
        raise PlanError(f"slots {slots}: a staged plan of {stages} stages needs at least {stages + extra}")
    if segment_elements < 1:
        raise PlanError(f"segment_elements {segment_elements}: must be positive")
    return (slots - extra) // stages


def _tick_barrier(b: PlanBuilder, tick: int, depth: int) -> None:
    # Everything peers did in ticks up to tick - depth: signal tick - depth + 1.
    if tick >= depth:
        b.wait(EVERYONE, tick - depth + 1, segment=tick)


def allreduce(
    rank: int,
    size: int,
    count: int,
    *,
    packed: bool = False,
    out: bool = False,
    align_elements: int = 16,
    segment_elements: int = 65536,
    slots: int = 3,
) -> Plan:
    """`direct` allreduce through STAGE. Arguments as in `direct.allreduce`.

    Each rank reduces a slice of every segment, and the others unpack the result. Two ranks rather reduce the whole
    segment each: as many bytes travel, and nobody waits for a result.
    """
    sliced = size > 2
    stages = 3 if sliced else 2
    depth = _depth(slots, stages, segment_elements)
    b = PlanBuilder(
        "direct.staged", "allreduce", rank, size, count, packed=packed, out=out, align=align_elements,
        segment=segment_elements, slots=slots,
    )  # fmt: skip
    b.enter()
    target = OUT if out else X
    if size == 1:
        if out and count:
            b.copy(b.own(X, 0, count), b.own(OUT, 0, count))
        return b.build()
    segments = pieces(0, count, segment_elements)
    cuts = {n: slices(n, size, align_elements) for n in {n for _, n in segments}}
    b.stage_elements = min(slots, len(segments)) * segment_elements if count else 0
    last = len(segments) + (stages - 1) * depth if segments else 0
    for tick in range(last):
        _tick_barrier(b, tick, depth)
        if tick < len(segments):
            at, n = segments[tick]
            slot = tick % slots * segment_elements
            # What this rank owns it reads from X, where that gives the same bits: a third of the copies less.
            lo, hi = cuts[n][rank : rank + 2] if sliced and not packed else (0, 0)
            for start, stop in ((0, lo), (hi, n)):
                if stop > start:
                    src = b.own(X, at + start, stop - start)
                    dst = b.own(STAGE, slot + start, stop - start)
                    b.convert(src, dst, packed=packed, raw=True, segment=tick)
        if 0 <= (now := tick - depth) < len(segments):
            at, n = segments[now]
            lo, hi = cuts[n][rank : rank + 2] if sliced else (0, n)
            slot = now % slots * segment_elements
            if hi > lo:
                own = None if packed else at + lo
                _reduce(b, slot + lo, hi - lo, target, at + lo, packed=packed, keep=sliced, own=own, segment=now)
        if sliced and 0 <= (now := tick - 2 * depth) < len(segments):
            at, n = segments[now]
            slot = now % slots * segment_elements
            for q in ((rank + i) % size for i in range(1, size)):
                lo, hi = cuts[n][q], cuts[n][q + 1]
                if hi > lo:
                    src, dst = (q, STAGE, slot + lo, hi - lo), b.own(target, at + lo, hi - lo)
                    b.convert(src, dst, packed=packed, segment=now)
        if tick < last - depth:
            b.signal(segment=tick)
    b.expect(EVERYONE, max(0, last - depth))
    return b.build()


def _reduce(
    b: PlanBuilder, stage_at: int, n: int, target: int, at: int, *, packed: bool, keep: bool, segment: int,
    own: int | None = None,
) -> None:  # fmt: skip
    # `own` None: own STAGE is read too, not X, so that the own operand is rounded to the wire like the others. The
    # result replaces the own operand there: nobody else reads that piece before.
    src = [(q, STAGE, stage_at, n) for q in range(b.size)]
    if own is not None:
        src[b.rank] = b.own(X, own, n)
    stage = [b.own(STAGE, stage_at, n)] if keep else []
    array = [b.own(target, at, n)]
    if packed:
        b.combine(src, [], stage, array, flags=FINAL, segment=segment)
    else:
        b.combine([], src, [], stage + array, flags=RAW_SOURCES | FINAL, segment=segment)


def reduce_scatter(
    rank: int,
    size: int,
    count: int,
    *,
    packed: bool = False,
    segment_elements: int = 65536,
    slots: int = 3,
) -> Plan:
    """`direct` reduce_scatter through STAGE: a slot holds one piece for every owner."""
    depth = _depth(slots, 2, segment_elements, extra=1)
    block = block_of(rank, size, count)
    b = PlanBuilder(
        "direct.staged", "reduce_scatter", rank, size, count, packed=packed, segment=segment_elements, slots=slots
    )
    b.enter()
    if size == 1:
        if count:
            b.copy(b.own(X, 0, count), b.own(OUT, 0, count))
        return b.build()
    length = max(1, segment_elements // size)
    segments = pieces(0, block, length)
    b.stage_elements = min(slots, len(segments)) * length * size
    last = len(segments) + depth if segments else 0
    for tick in range(last):
        _tick_barrier(b, tick, depth)
        if tick < len(segments):
            at, n = segments[tick]
            for q in range(size):
                if q == rank and not packed:
                    continue
                slot = (tick % slots * size + q) * length
                src = b.own(X, q * block + at, n)
                b.convert(src, b.own(STAGE, slot, n), packed=packed, raw=True, segment=tick)
            b.signal(segment=tick)
        elif tick < last - depth:
            b.signal(segment=tick)
        if 0 <= (now := tick - depth) < len(segments):
            at, n = segments[now]
            slot = (now % slots * size + rank) * length
            own = None if packed else rank * block + at
            _reduce(b, slot, n, OUT, at, packed=packed, keep=False, own=own, segment=now)
    b.expect(EVERYONE, len(segments))
    return b.build()


def allgather(
    rank: int,
    size: int,
    count: int,
    *,
    packed: bool = False,
    segment_elements: int = 65536,
    slots: int = 3,
) -> Plan:
    """`direct` allgather through STAGE."""
    depth = _depth(slots, 2, segment_elements, extra=1)
    b = PlanBuilder(
        "direct.staged", "allgather", rank, size, count, packed=packed, segment=segment_elements, slots=slots
    )
    b.enter()
    if size == 1:
        if count:
            b.copy(b.own(X, 0, count), b.own(OUT, 0, count))
        return b.build()
    segments = pieces(0, count, segment_elements)
    b.stage_elements = min(slots, len(segments)) * segment_elements if count else 0
    for tick in range(len(segments) + depth if segments else 0):
        _tick_barrier(b, tick, depth)
        if tick < len(segments):
            at, n = segments[tick]
            slot = tick % slots * segment_elements
            b.convert(b.own(X, at, n), b.own(STAGE, slot, n), packed=packed, segment=tick)
            b.signal(segment=tick)
        if 0 <= (now := tick - depth) < len(segments):
            at, n = segments[now]
            slot = now % slots * segment_elements
            for q in ((rank + i) % size for i in range(size)):
                src, dst = (q, STAGE, slot, n), b.own(OUT, q * count + at, n)
                b.convert(src, dst, packed=packed, segment=now)
    b.expect(EVERYONE, len(segments))
    return b.build()


def broadcast(
    rank: int,
    size: int,
    count: int,
    *,
    root: int = 0,
    segment_elements: int = 65536,
    slots: int = 3,
) -> Plan:
    """`direct` broadcast through the root's STAGE; a reader's signal gives its slot back."""
    _depth(slots, 1, segment_elements)
    b = PlanBuilder("direct.staged", "broadcast", rank, size, count, root=root, segment=segment_elements, slots=slots)
    b.enter()
    if size == 1:
        return b.build()
    segments = pieces(0, count, segment_elements)
    b.stage_elements = min(slots, len(segments)) * segment_elements if count else 0
    for index, (at, n) in enumerate(segments):
        stage = (root, STAGE, index % slots * segment_elements, n)
        if rank == root:
            if index >= slots:
                b.wait(EVERYONE, index - slots + 1, segment=index)
            b.copy(b.own(X, at, n), stage, segment=index)
            b.signal(segment=index)
        else:
            b.wait(root, index + 1, segment=index)
            b.copy(stage, b.own(X, at, n), segment=index)
            b.signal(root, segment=index)
    b.expect(EVERYONE if rank == root else root, len(segments))
    return b.build()
