"""Owns allreduce over a list of arrays: one entry and one exit for all, or one by one where that is not possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gfkernels import arrays, kernels
from gfkernels.arrays.host import HostArray
from gfkernels.communicator.programs import effective_wire
from gfkernels.communicator.requests import Request, parse_op, parse_wire
from gfkernels.engine.context import MAX_ARRAYS, Ctx, Kind
from gfkernels.errors import UsageError
from gfkernels.types import DType, ReduceOp

if TYPE_CHECKING:
    from gfkernels.communicator.communicator import Communicator


def reduce_list(comm: Communicator, xs: Sequence[Any], op: str, wire: str | None) -> list[Any]:
    """See `Communicator.allreduce_many`."""
    try:
        reduction, items, wire_dtype = _inspected(xs, op, wire, comm.config.wire)
    except UsageError as error:
        if comm._core is not None:
            comm._core.refuse_locally(error)
        raise
    if comm._core is not None and items:
        for first in range(0, len(items), MAX_ARRAYS):
            _reduce(comm, reduction, items[first : first + MAX_ARRAYS], wire_dtype)
    for item in items:
        item.finish()
    return [item.result() for item in items]


def _inspected(
    xs: Sequence[Any], op: str, wire: str | None, default_wire: str | None
) -> tuple[ReduceOp, list[HostArray], DType | None]:
    reduction, wire_dtype = parse_op(op), parse_wire(wire, default_wire)
    if not isinstance(xs, Sequence) or isinstance(xs, str | bytes):
        raise UsageError(f"allreduce_many takes a list of arrays, not a {type(xs).__name__}")
    items = [arrays.inspect(x, role=f"xs[{i}]") for i, x in enumerate(xs)]
    for i, item in enumerate(items):
        try:
            kernels.check(reduction, item.dtype, wire_dtype if item.dtype.kind == "f" else None)
        except UsageError as error:
            raise UsageError(f"xs[{i}]: {error}") from None
    spans = sorted((*item.extent(), i) for i, item in enumerate(items) if item.count)
    for (_, end, i), (start, _, j) in pairwise(spans):
        if start < end:
            raise UsageError(
                f"xs[{min(i, j)}] and xs[{max(i, j)}] share memory; each would be reduced into the other. Pass every "
                "array once"
            )
    return reduction, items, wire_dtype


def _reduce(comm: Communicator, op: ReduceOp, items: list[HostArray], wire: DType | None) -> None:
    core = comm._core
    assert core is not None
    if core.plane.same_host and core.config.plan in ("auto", "direct"):
        program = core.programs.get_many(op, [(item.dtype, item.count) for item in items], wire)
        addresses = program.addresses
        addresses[: len(items) - 1] = [item.address for item in items[1:]]
        comm._run(program, items[0].address, 0, items)
        if int(core.words[Ctx.KIND]) != Kind.STAGED:
            return
        agreed = 0
    else:
        # Nobody has compared the lists: the first array that travels does, or a shorter list would go unnoticed.
        agreed = Request("allreduce_many", op).signature([(item.dtype.code, item.count) for item in items])
    for item in items:
        chosen = effective_wire(item.dtype, wire) if item.dtype.kind == "f" else None
        request = Request("allreduce", op, item.dtype, chosen, item.count, part_of=agreed)
        agreed = 0 if item.count else agreed
        comm._run(core.programs.get(request), item.address, 0, items)
