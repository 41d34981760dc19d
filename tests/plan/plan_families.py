"""Owns the list of plan families under test: every builder in every variant, by name, as a function of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from gfkernels.plan import direct, doubling, many, ring
from gfkernels.plan.model import Plan

Family = Callable[[int, int, int], list[Plan]]
"""(size, count, segment_elements) -> plans of all ranks. For reduce_scatter, count is one rank's block."""


def _all(builder: Callable[..., Plan], size: int, count: int, **arguments: object) -> list[Plan]:
    return [builder(rank, size, count, **arguments) for rank in range(size)]


def _direct_allreduce(variant: str, packed: bool, out: bool, size: int, count: int, segment: int) -> list[Plan]:
    return _all(
        direct.allreduce,
        size,
        count,
        variant=variant,
        packed=packed,
        out=out,
        segment_elements=segment,
        align_elements=4,
    )


def _direct_scatter(variant: str, packed: bool, size: int, count: int, segment: int) -> list[Plan]:
    # A staged segment holds a piece for every owner.
    length = segment * size if variant == "staged" else segment
    shape = {"variant": variant, "packed": packed, "segment_elements": length}
    return _all(direct.reduce_scatter, size, size * count, **shape)


def _direct_gather(variant: str, packed: bool, size: int, count: int, segment: int) -> list[Plan]:
    return _all(direct.allgather, size, count, variant=variant, packed=packed, segment_elements=segment)


def _direct_broadcast(variant: str, size: int, count: int, segment: int) -> list[Plan]:
    return _all(direct.broadcast, size, count, variant=variant, root=size // 2, segment_elements=segment)


def _ring_allreduce(
    packed: bool, out: bool, direct_write: bool, enter: bool, size: int, count: int, segment: int
) -> list[Plan]:
    shape = {"packed": packed, "out": out, "direct_write": direct_write, "enter": enter}
    per_rank = max(1, segment // size)
    return _all(ring.allreduce, size, count, segment_elements=per_rank, slots=4, align_elements=1, **shape)


def _ring_scatter(packed: bool, enter: bool, size: int, count: int, segment: int) -> list[Plan]:
    shape = {"packed": packed, "enter": enter, "segment_elements": segment, "slots": 3}
    return _all(ring.reduce_scatter, size, size * count, **shape)


def _ring_gather(packed: bool, direct_write: bool, enter: bool, size: int, count: int, segment: int) -> list[Plan]:
    shape = {"packed": packed, "direct_write": direct_write, "enter": enter}
    return _all(ring.allgather, size, count, segment_elements=segment, slots=2, **shape)


def _ring_broadcast(direct_write: bool, enter: bool, size: int, count: int, segment: int) -> list[Plan]:
    shape = {"direct_write": direct_write, "enter": enter, "root": size // 2, "slots": 3}
    return _all(ring.broadcast, size, count, segment_elements=segment, **shape)


def _doubling(packed: bool, out: bool, enter: bool, size: int, count: int, segment: int) -> list[Plan]:
    return _all(doubling.allreduce, size, count, packed=packed, out=out, enter=enter)


def _barrier(enter: bool, size: int, count: int, segment: int) -> list[Plan]:
    return [direct.barrier(rank, size, enter=enter) for rank in range(size)]


def _many(variant: str, packed: bool, size: int, count: int, segment: int) -> list[Plan]:
    counts = [count, 0, 5, count // 2, 3]
    shape: dict[str, object] = {"variant": variant, "packed": packed, "segment_elements": segment}
    if packed:
        shape["wire_itemsizes"] = 2
    return [
        many.allreduce_many(rank, size, counts, inline_nbytes=512, array_inline_nbytes=128, **shape)  # type: ignore[arg-type]
        for rank in range(size)
    ]


def families() -> Iterator[tuple[str, Family]]:
    """(name, family) of all."""
    flags = (False, True)
    for variant in direct.VARIANTS:
        for packed in flags:
            for out in flags:
                name = f"direct-{variant}-allreduce-packed{packed:d}-out{out:d}"
                yield name, partial(_direct_allreduce, variant, packed, out)
            yield f"direct-{variant}-reduce_scatter-packed{packed:d}", partial(_direct_scatter, variant, packed)
            yield f"direct-{variant}-allgather-packed{packed:d}", partial(_direct_gather, variant, packed)
        yield f"direct-{variant}-broadcast", partial(_direct_broadcast, variant)
    for enter in flags:
        for packed in flags:
            for out in flags:
                yield f"doubling-packed{packed:d}-out{out:d}-enter{enter:d}", partial(_doubling, packed, out, enter)
                for landing in flags:
                    name = f"ring-allreduce-packed{packed:d}-out{out:d}-landing{landing:d}-enter{enter:d}"
                    yield name, partial(_ring_allreduce, packed, out, landing, enter)
            yield f"ring-reduce_scatter-packed{packed:d}-enter{enter:d}", partial(_ring_scatter, packed, enter)
            for landing in flags:
                name = f"ring-allgather-packed{packed:d}-landing{landing:d}-enter{enter:d}"
                yield name, partial(_ring_gather, packed, landing, enter)
        for landing in flags:
            yield f"ring-broadcast-landing{landing:d}-enter{enter:d}", partial(_ring_broadcast, landing, enter)
        yield f"barrier-enter{enter:d}", partial(_barrier, enter)
    for variant in ("registered", "cma"):
        for packed in flags:
            yield f"many-{variant}-packed{packed:d}", partial(_many, variant, packed)


FAMILIES = dict(families())
