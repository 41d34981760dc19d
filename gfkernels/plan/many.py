"""Owns the plan that reduces a list of arrays with one ENTER and one exit barrier."""

from __future__ import annotations

from collections.abc import Sequence

from gfkernels.plan.direct import publish, reduce_inline, reduce_slice, reduce_slice_cma
from gfkernels.plan.model import Plan, PlanBuilder, PlanError, slices
from gfkernels.types import N_BUFFERS, Buffer

_LINE_NBYTES = 64


def buffer_of(index: int) -> int:
    """The buffer id of array `index` of a list: X, then numbers from `N_BUFFERS` on."""
    return int(Buffer.X) if index == 0 else N_BUFFERS + index - 1


def allreduce_many(
    rank: int,
    size: int,
    counts: Sequence[int],
    *,
    variant: str = "registered",
    packed: Sequence[bool] | bool = False,
    itemsizes: Sequence[int] | int = 4,
    wire_itemsizes: Sequence[int] | int | None = None,
    inline_nbytes: int = 0,
    array_inline_nbytes: int = 4096,
    segment_elements: int = 65536,
) -> Plan:
    """`direct` allreduce in place over many arrays.

    Small arrays are published through INLINE before ENTER, in list order while they fit; every rank reduces those for
    itself. The other ones are cut into slices like single arrays. Without other ones there is no exit barrier.

    Args:
        rank: whose plan.
        size: number of ranks.
        counts: elements of each array.
        variant: "registered" or "cma", for the arrays that do not go through INLINE.
        packed: whether a wire dtype other than the array's is set, for all or per array.
        itemsizes: bytes of an array's element, for all or per array.
        wire_itemsizes: bytes of an element in INLINE; None: as `itemsizes`.
        inline_nbytes: how much of INLINE may be used; offsets there are multiples of 64 bytes.
        array_inline_nbytes: arrays of more bytes than this on the wire do not go through INLINE: every rank reading
            all of every array costs more than slices do.
        segment_elements: elements of a piece per peer ("cma").
    """
    if variant not in ("registered", "cma"):
        raise PlanError(f"variant {variant!r} of a plan over many arrays: expected registered or cma")
    n = len(counts)
    flags = list(packed) if isinstance(packed, Sequence) else [packed] * n
    items = list(itemsizes) if isinstance(itemsizes, Sequence) else [itemsizes] * n
    wires = items if wire_itemsizes is None else wire_itemsizes
    wires = list(wires) if isinstance(wires, Sequence) else [wires] * n
    if not len(flags) == len(items) == len(wires) == n:
        raise PlanError(f"{n} arrays, but {len(flags)} packed, {len(items)} itemsizes, {len(wires)} wire_itemsizes")
    b = PlanBuilder(
        f"direct.{variant}", "allreduce_many", rank, size, sum(counts), counts=tuple(counts), packed=tuple(flags),
        items=tuple(items), wires=tuple(wires), inline=inline_nbytes, array_inline=array_inline_nbytes,
        segment=segment_elements if variant == "cma" else 0,
    )  # fmt: skip
    if size == 1:
        b.enter()
        return b.build()
    inlined: list[tuple[int, int]] = []
    sliced: list[int] = []
    used = 0
    for index, count in enumerate(counts):
        nbytes = -(-count * wires[index] // _LINE_NBYTES) * _LINE_NBYTES
        if count and nbytes <= array_inline_nbytes and used + nbytes <= inline_nbytes:
            inlined.append((index, used // wires[index]))
            used += nbytes
        elif count:
            sliced.append(index)
    for index, at in inlined:
        publish(b, buffer_of(index), counts[index], packed=flags[index], at=at, array_index=index)
    b.inline_elements = used
    b.enter()
    for index, at in inlined:
        reduce_inline(b, buffer_of(index), 0, counts[index], packed=flags[index], at=at, array_index=index)
    first = 0
    for index in sliced:
        count, buffer = counts[index], buffer_of(index)
        align = max(1, _LINE_NBYTES // items[index])
        bounds = slices(count, size, align)
        # Who takes which slice rotates, so that arrays of few lines do not all fall to rank 0.
        piece = (rank - first) % size
        first = (first + min(size, -(-count // align))) % size
        lo, hi = bounds[piece], bounds[piece + 1]
        if variant == "registered":
            reduce_slice(b, buffer, buffer, lo, hi, everywhere=True, array_index=index)
        else:
            reduce_slice_cma(
                b, buffer, buffer, lo, hi, segment_elements=segment_elements, everywhere=True, array_index=index
            )
    if sliced:
        b.exit_barrier()
    return b.build()
