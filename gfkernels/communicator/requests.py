"""Owns what a caller asks for, in one hashable value: the collective and everything that all ranks must agree on."""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

from gfkernels.errors import UsageError
from gfkernels.types import DTYPES, DType, ReduceOp

COLLECTIVES: Final = ("allreduce", "reduce_scatter", "allgather", "broadcast", "barrier", "allreduce_many")
REDUCING: Final = ("allreduce", "reduce_scatter", "allreduce_many")
OPS: Final = {op.label: op for op in ReduceOp}
WIRES: Final = ("float16", "bfloat16")


class Request(NamedTuple):
    """One call as all ranks must make it.

    Attributes:
        collective: one of `COLLECTIVES`.
        op: the reduction; SUM where nothing is reduced.
        dtype: of the elements; None for a barrier.
        wire: dtype that travels, None: the array's own.
        elements: of the input.
        out: whether the result of an allreduce goes to another array: on all ranks or on none.
        root: of a broadcast.
        part_of: of a list's first array where the list runs one by one: a number that differs where lists differ.
    """

    collective: str
    op: ReduceOp = ReduceOp.SUM
    dtype: DType | None = None
    wire: DType | None = None
    elements: int = 0
    out: bool = False
    root: int = 0
    part_of: int = 0

    @property
    def code(self) -> int:
        """Collective, op, dtype and wire in one word, for headers; `describe_code` reads it."""
        dtype = 255 if self.dtype is None else self.dtype.code
        wire = 255 if self.wire is None else self.wire.code
        return COLLECTIVES.index(self.collective) | int(self.op) << 8 | dtype << 16 | wire << 24

    def signature(self, *agreed: object) -> int:
        """A positive 62-bit number that differs where requests, or other things to be agreed, differ."""
        text = repr((self.code, self.elements, self.root, self.out, self.part_of, *agreed))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2

    def row(self) -> dict[str, Any]:
        """For tables of mismatches and the call history."""
        row: dict[str, Any] = {"call": self.collective}
        if self.collective in REDUCING:
            row["op"] = self.op.label
        if self.dtype is not None:
            row |= {"dtype": self.dtype.name, "count": self.elements}
        if self.wire is not None:
            row["wire"] = self.wire.name
        if self.collective == "broadcast":
            row["root"] = self.root
        if self.collective == "allreduce" and self.out:
            row["out"] = True
        return row

    def __str__(self) -> str:
        parts = [f"{key}={value}" for key, value in self.row().items() if key != "call"]
        return f"{self.collective}({', '.join(parts)})"


def parse_op(op: Any) -> ReduceOp:
    """The reduction of a name.

    Raises:
        UsageError: unknown.
    """
    found = OPS.get(op) if isinstance(op, str) else None
    if found is None:
        raise UsageError(f"op={op!r}: expected one of {', '.join(map(repr, OPS))}")
    return found


def parse_wire(wire: Any, default: str | None) -> DType | None:
    """The dtype that travels, None for the array's own.

    Raises:
        UsageError: not one that can travel.
    """
    wire = default if wire is None else wire
    if wire is None:
        return None
    name = wire if isinstance(wire, str) else getattr(wire, "name", None) or getattr(wire, "__name__", str(wire))
    if name not in WIRES:
        raise UsageError(f"wire={wire!r}: expected None, 'float16' or 'bfloat16'")
    return DTYPES[name]
