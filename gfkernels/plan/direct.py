"""Owns `direct` allreduce and the pull collectives on memory that all ranks of the host can reach.

The owner of a slice reads that slice of all ranks and writes it to all ranks. Three ways to the peers' arrays:
"registered" (mapped: kernels work on them), "cma" (GET into SCRATCH, PUT back) and, for small arrays, "inline" (every
rank publishes its array next to its header). All give equal bits: operands rounded to the wire, ascending rank order.
"""

from __future__ import annotations

from gfkernels.plan import staged
from gfkernels.plan.model import EVERYONE, NO_SIGNAL, Plan, PlanBuilder, PlanError, Span, block_of, pieces, slices
from gfkernels.types import FINAL, RAW_SOURCES, ROUND_RAW, Buffer

VARIANTS = ("registered", "cma", "staged", "inline")
_ALL_FLAGS = RAW_SOURCES | FINAL | ROUND_RAW


def check_variant(variant: str) -> None:
    """Refuses an unknown way to the peers' memory."""
    if variant not in VARIANTS:
        raise PlanError(f"variant {variant!r}: expected one of {', '.join(VARIANTS)}")


def reduce_slice(
    b: PlanBuilder,
    source: int,
    target: int,
    lo: int,
    hi: int,
    *,
    everywhere: bool,
    shift: int = 0,
    array_index: int = 0,
) -> None:
    """One COMBINE on mapped arrays: all ranks' [lo, hi) of `source` into `target` of all ranks or of this one."""
    n = hi - lo
    if n == 0:
        return
    src = [(q, source, lo, n) for q in range(b.size)]
    readers = range(b.size) if everywhere else (b.rank,)
    b.combine([], src, [], [(q, target, lo - shift, n) for q in readers], flags=_ALL_FLAGS, array_index=array_index)


def reduce_slice_cma(
    b: PlanBuilder,
    source: int,
    target: int,
    lo: int,
    hi: int,
    *,
    segment_elements: int,
    everywhere: bool,
    shift: int = 0,
    array_index: int = 0,
) -> None:
    """The same by GET, COMBINE and PUT, in pieces that stay in the cache."""
    b.scratch_elements = max(b.scratch_elements, (b.size - 1) * min(segment_elements, hi - lo))
    for index, (at, n) in enumerate(pieces(lo, hi, segment_elements)):
        label = {"segment": index, "array_index": array_index}
        src: list[Span] = []
        for q in range(b.size):
            if q == b.rank:
                src.append(b.own(source, at, n))
                continue
            slot = q if q < b.rank else q - 1
            src.append(b.own(Buffer.SCRATCH, slot * min(segment_elements, hi - lo), n))
            b.get(q, (q, source, at, n), src[-1], **label)
        own = b.own(target, at - shift, n)
        b.combine([], src, [], [own], flags=_ALL_FLAGS, **label)
        for q in _others(b.rank, b.size) if everywhere else ():
            b.put(q, own, (q, target, at - shift, n), channel=NO_SIGNAL, **label)


def _others(rank: int, size: int) -> list[int]:
    # Starting behind oneself, so that not all ranks hammer the same peer at once.
    return [(rank + i) % size for i in range(1, size)]


def allreduce(
    rank: int,
    size: int,
    count: int,
    *,
    variant: str = "registered",
    packed: bool = False,
    out: bool = False,
    align_elements: int = 16,
    segment_elements: int = 65536,
    slots: int = 3,
) -> Plan:
    """`direct` allreduce on one host.

    Args:
        rank: whose plan.
        size: number of ranks.
        count: elements of the array.
        variant: "registered", "cma", "staged" or "inline".
        packed: whether a wire dtype other than the array's is set.
        out: the result goes to OUT (X stays) instead of X.
        align_elements: slices begin at multiples of this (64 bytes).
        segment_elements: elements of a piece ("cma", per peer) or of a whole-array segment ("staged").
        slots: segments in flight ("staged"), at least 3.
    """
    check_variant(variant)
    if variant == "staged":
        return staged.allreduce(
            rank,
            size,
            count,
            packed=packed,
            out=out,
            align_elements=align_elements,
            segment_elements=segment_elements,
            slots=slots,
        )
    parameters: dict[str, int] = {"packed": packed, "out": out}
    if variant != "inline":
        parameters["align"] = align_elements
    if variant == "cma":
        parameters["segment"] = segment_elements
    b = PlanBuilder(f"direct.{variant}", "allreduce", rank, size, count, **parameters)
    target = Buffer.OUT if out else Buffer.X
    if size == 1:
        b.enter()
        if out and count:
            b.copy(b.own(Buffer.X, 0, count), b.own(Buffer.OUT, 0, count))
    elif variant == "inline":
        publish(b, Buffer.X, count, packed=packed)
        b.enter()
        if count:
            reduce_inline(b, target, 0, count, packed=packed)
    else:
        b.enter()
        bounds = slices(count, size, align_elements)
        lo, hi = bounds[rank], bounds[rank + 1]
        if variant == "registered":
            reduce_slice(b, Buffer.X, target, lo, hi, everywhere=True)
        else:
            reduce_slice_cma(b, Buffer.X, target, lo, hi, segment_elements=segment_elements, everywhere=True)
        b.exit_barrier()
    return b.build()


def publish(
    b: PlanBuilder, source: int, count: int, *, packed: bool, raw: bool = True, at: int = 0, array_index: int = 0
) -> None:
    """A pre-step: the own array into the own INLINE area."""
    if count:
        b.convert(
            b.own(source, 0, count), b.own(Buffer.INLINE, at, count), packed=packed, raw=raw, array_index=array_index
        )
    b.inline_elements = max(b.inline_elements, at + count)


def reduce_inline(
    b: PlanBuilder, target: int, lo: int, count: int, *, packed: bool, at: int = 0, shift: int = 0, array_index: int = 0
) -> None:
    """Every rank reduces [lo, lo + count) of all INLINE areas for itself."""
    src = [(q, int(Buffer.INLINE), at + lo, count) for q in range(b.size)]
    dst = [b.own(target, lo - shift, count)]
    if packed:
        b.combine(src, [], [], dst, flags=FINAL, array_index=array_index)
    else:
        b.combine([], src, [], dst, flags=RAW_SOURCES | FINAL, array_index=array_index)


def reduce_scatter(
    rank: int,
    size: int,
    count: int,
    *,
    variant: str = "registered",
    packed: bool = False,
    segment_elements: int = 65536,
    slots: int = 3,
) -> Plan:
    """`direct` reduce_scatter: block `rank` of the sum over all X (`count` elements each, divisible) into OUT."""
    check_variant(variant)
    block = block_of(rank, size, count)
    if variant == "staged":
        return staged.reduce_scatter(rank, size, count, packed=packed, segment_elements=segment_elements, slots=slots)
    parameters: dict[str, int] = {"packed": packed}
    if variant == "cma":
        parameters["segment"] = segment_elements
    b = PlanBuilder(f"direct.{variant}", "reduce_scatter", rank, size, count, **parameters)
    lo, hi = rank * block, (rank + 1) * block
    if size == 1:
        b.enter()
        if count:
            b.copy(b.own(Buffer.X, 0, count), b.own(Buffer.OUT, 0, count))
    elif variant == "inline":
        publish(b, Buffer.X, count, packed=packed)
        b.enter()
        if block:
            reduce_inline(b, Buffer.OUT, lo, block, packed=packed, shift=lo)
    else:
        b.enter()
        if variant == "registered":
            reduce_slice(b, Buffer.X, Buffer.OUT, lo, hi, everywhere=False, shift=lo)
        else:
            reduce_slice_cma(
                b, Buffer.X, Buffer.OUT, lo, hi, segment_elements=segment_elements, everywhere=False, shift=lo
            )
        b.exit_barrier()
    return b.build()


def allgather(
    rank: int,
    size: int,
    count: int,
    *,
    variant: str = "registered",
    packed: bool = False,
    segment_elements: int = 65536,
    slots: int = 3,
) -> Plan:
    """`direct` allgather: X of every rank (`count` elements) into OUT (`size * count`), pulled by every rank.

    With a wire dtype every block is rounded to it, the own one too, so that all ranks hold equal bits.
    """
    check_variant(variant)
    if variant == "staged":
        return staged.allgather(rank, size, count, packed=packed, segment_elements=segment_elements, slots=slots)
    packed = packed and size > 1
    b = PlanBuilder(f"direct.{variant}", "allgather", rank, size, count, packed=packed)
    if variant == "inline" and size > 1:
        publish(b, Buffer.X, count, packed=packed, raw=False)
    b.enter()
    if count:
        for q in (rank, *_others(rank, size)):
            dst = b.own(Buffer.OUT, q * count, count)
            if variant == "inline" and size > 1:
                b.convert((q, Buffer.INLINE, 0, count), dst, packed=packed, segment=q)
            elif variant == "cma" and q != rank:
                b.get(q, (q, Buffer.X, 0, count), dst, segment=q)
                if packed:
                    b.convert(dst, dst, packed=True, segment=q)
            else:
                b.convert((q, Buffer.X, 0, count), dst, packed=packed, segment=q)
    if variant != "inline":
        b.exit_barrier()
    return b.build()


def broadcast(
    rank: int,
    size: int,
    count: int,
    *,
    root: int = 0,
    variant: str = "registered",
    segment_elements: int = 65536,
    slots: int = 3,
) -> Plan:
    """`direct` broadcast: every rank pulls the root's X into its own. Only the root has to wait for the readers."""
    check_variant(variant)
    if not 0 <= root < size:
        raise PlanError(f"root {root}: expected 0 <= root < {size}")
    if variant == "staged":
        return staged.broadcast(rank, size, count, root=root, segment_elements=segment_elements, slots=slots)
    b = PlanBuilder(f"direct.{variant}", "broadcast", rank, size, count, root=root)
    if variant == "inline" and rank == root and size > 1:
        publish(b, Buffer.X, count, packed=False)
    b.inline_elements = count if variant == "inline" else 0
    b.enter()
    own = b.own(Buffer.X, 0, count)
    if rank != root and count:
        if variant == "inline":
            b.copy((root, Buffer.INLINE, 0, count), own)
        elif variant == "cma":
            b.get(root, (root, Buffer.X, 0, count), own)
        else:
            b.copy((root, Buffer.X, 0, count), own)
    if variant != "inline":
        if rank == root:
            b.wait(EVERYONE, 1)
            b.expect(EVERYONE, 1)
        else:
            b.signal(root)
    return b.build()


def barrier(rank: int, size: int, count: int = 0, *, enter: bool = True) -> Plan:
    """ENTER on one host; elsewhere dissemination: in round k tell rank + 2^k, hear from rank - 2^k."""
    b = PlanBuilder("direct" if enter else "dissemination", "barrier", rank, size, 0)
    if enter:
        b.enter()
        return b.build()
    b.lane(0)
    distance = 1
    while distance < size:
        before = (rank - distance) % size
        b.signal((rank + distance) % size, segment=distance)
        b.wait(before, 1, segment=distance)
        b.expect(before, 1)
        distance *= 2
    return b.build()
