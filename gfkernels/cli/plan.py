"""Owns `gfkernels plan`: prints, checks and draws the plan of a collective without running it."""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer
from rich.console import Console

from gfkernels.errors import GfkernelsError, UsageError
from gfkernels.plan import draw, text
from gfkernels.plan.check import check
from gfkernels.plan.choose import INLINE_NBYTES, PLANS, Choice, choose, mean_prescale
from gfkernels.plan.direct import VARIANTS
from gfkernels.plan.model import Plan
from gfkernels.types import DTYPES, Buffer, DType, ReduceOp

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "barrier")
_WIRES: Final = ("float16", "bfloat16")
_MOST_ROWS: Final = 400_000
"""Of all ranks together: building, checking and drawing more would take minutes."""
_PIPED_COLUMNS: Final = 140
"""A pipe or a file has no width; 80 columns would cut the spans."""


def _dtype(name: str) -> DType:
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _check_arithmetic(op: ReduceOp, array: DType, wire: str | None) -> None:
    if wire is not None and wire not in _WIRES:
        raise UsageError(f"wire {wire!r}: expected one of {', '.join(_WIRES)}")
    if wire is not None and array.kind != "f":
        raise UsageError(f"wire {wire!r} with dtype {array.name!r}: only floating-point arrays can be rounded")
    if op == ReduceOp.MEAN and array.kind != "f":
        raise UsageError(
            f"op 'mean' of {array.name}: integers have no mean here; take 'sum', or a floating-point dtype"
        )
    if array.kind == "b" and op not in (ReduceOp.MIN, ReduceOp.MAX):
        raise UsageError(f"op {op.label!r} of bool: expected min or max")


def chosen(
    name: str,
    *,
    size: int,
    count: int,
    collective: str = "allreduce",
    op: str = "sum",
    dtype: str = "float32",
    wire: str | None = None,
    variant: str | None = None,
    network: bool = False,
    root: int = 0,
    segment_bytes: int | None = None,
    lanes: int | None = None,
) -> Choice:
    """What a communicator would choose; without a variant: for arrays made by `gfkernels.empty`.

    Raises:
        UsageError: a name that does not exist, or a plan that cannot do this.
    """
    if collective not in COLLECTIVES:
        raise UsageError(f"collective {collective!r}: expected one of {', '.join(COLLECTIVES)}")
    if op.upper() not in ReduceOp.__members__:
        raise UsageError(f"op {op!r}: expected one of {', '.join(o.label for o in ReduceOp)}")
    if variant is not None and variant not in VARIANTS:
        raise UsageError(f"variant {variant!r}: expected one of {', '.join(VARIANTS)}")
    if not 0 <= root < size:
        raise UsageError(f"root {root}: expected 0 <= root < {size}")
    array = _dtype(dtype)
    if collective in ("allreduce", "reduce_scatter"):
        _check_arithmetic(ReduceOp[op.upper()], array, wire)
    travels = _dtype(wire) if wire else None
    wired = travels is not None and travels.name != array.name
    # A variant that is asked for is shown for any size.
    inline_bytes = INLINE_NBYTES if variant is None else 1 << 60 if variant == "inline" else 0
    return choose(
        collective,
        size=size,
        count=count,
        itemsize=array.itemsize,
        wire_itemsize=travels.itemsize if travels else None,
        wired=wired,
        prescaled=mean_prescale(ReduceOp[op.upper()], array, travels, size)[0] != 1.0,
        same_host=not network,
        variant=variant or "registered",
        plan=name,
        root=root,
        segment_bytes=segment_bytes,
        lanes=lanes,
        inline_bytes=inline_bytes,
    )


def _build(choice: Choice, rank: int) -> list[Plan]:
    """The plans of all ranks, or of one only where all would be too long."""
    first = choice.build(rank)
    if choice.size * len(first.steps) > _MOST_ROWS:
        return [first]
    return [first if other == rank else choice.builder(other, choice.size, choice.count, **dict(choice.arguments))
            for other in range(choice.size)]  # fmt: skip


def _hint(plan: Plan, itemsize: int) -> str:
    """What to say of a ring that is too short to be a pipeline."""
    moved = plan.spans["count"][plan.spans["buffer"] == Buffer.STAGE]
    if plan.name != "ring" or plan.n_lanes != 1 or not len(moved):
        return ""
    nbytes = max(1, int(moved.max()) * itemsize // 4)
    return f"Each chunk is one segment, which leaves little to overlap: --segment-bytes {nbytes} shows a pipeline."


def plan_command(
    name: Annotated[str, typer.Argument(help=f"The algorithm: {', '.join(PLANS)}.")] = "auto",
    n: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Number of ranks.")] = 4,
    count: Annotated[int, typer.Option(min=0, help="Elements of every rank's array.")] = 1000,
    collective: Annotated[str, typer.Option(help=f"One of {', '.join(COLLECTIVES)}.")] = "allreduce",
    op: Annotated[str, typer.Option(help="The reduction.")] = "sum",
    dtype: Annotated[str, typer.Option(help="Element type of the arrays.")] = "float32",
    wire: Annotated[str | None, typer.Option(help="Element type that travels; default: the arrays' own.")] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            help=f"Way to a local peer's memory, whatever the size: {', '.join(VARIANTS)}. Default: as chosen."
        ),
    ] = None,
    network: Annotated[bool, typer.Option("--network", help="The ranks are on several hosts.")] = False,
    root: Annotated[int, typer.Option(help="Root of a broadcast.")] = 0,
    segment_bytes: Annotated[int | None, typer.Option(min=1, help="Bytes of a message.")] = None,
    lanes: Annotated[int | None, typer.Option(min=1, help="Concurrent pipelines.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="Whose rows to print.")] = 0,
    rows: Annotated[int, typer.Option(min=0, help="Rows to print at most; 0: none.")] = 40,
    picture: Annotated[
        str | None, typer.Option("--draw", metavar="FILE", help="Write a picture: .svg or .png.")
    ] = None,
    prove: Annotated[
        bool, typer.Option("--check", help="Prove the plan, all ranks together, over three calls.")
    ] = False,
) -> None:
    """Print, check and draw the plan of a collective."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_COLUMNS)
    try:
        if rank >= n:
            raise UsageError(f"rank {rank}: expected 0 <= rank < {n}")
        if picture:
            draw.check_name(picture)
        choice = chosen(
            name,
            size=n,
            count=count,
            collective=collective,
            op=op,
            dtype=dtype,
            wire=wire,
            variant=variant,
            network=network,
            root=root,
            segment_bytes=segment_bytes,
            lanes=lanes,
        )
        _show(console, choice, rank, rows, prove, picture, _dtype(wire or dtype).itemsize)
    except GfkernelsError as error:
        Console(stderr=True, soft_wrap=True).print(f"gfkernels plan: {error}", style="bold red", markup=False)
        raise typer.Exit(2) from None


def _show(
    console: Console, choice: Choice, rank: int, rows: int, prove: bool, picture: str | None, itemsize: int
) -> None:
    ascii_only = console.options.ascii_only
    plans = _build(choice, rank)
    own = plans[min(rank, len(plans) - 1)]
    for line in draw.heading(own):
        console.print(line, markup=False, highlight=False)
    console.print()
    if len(plans) == choice.size:
        console.print(text.chart(plans, console.width, ascii_only=ascii_only))
        hint = _hint(own, itemsize)
        if hint:
            console.print(hint, markup=False, highlight=False, style="dim")
    else:
        about = f"{choice.size} ranks with {len(own.steps)} rows each"
        if prove or picture:
            raise UsageError(
                f"{about} are too many to check or draw ({_MOST_ROWS} in all): take fewer elements or ranks"
            )
        console.print(f"{about}: too many for a chart", markup=False, highlight=False)
    if rows:
        console.print()
        console.print(text.table(own, limit=rows, ascii_only=ascii_only))
    if prove:
        start = time.perf_counter()
        check(plans)
        steps = sum(len(plan.steps) for plan in plans)
        console.print(
            f"checked: {choice.size} ranks, {steps} rows, 3 calls in a row: right, ordered, free of deadlock "
            f"({time.perf_counter() - start:.2f} s)",
            markup=False,
            highlight=False,
        )
    if picture:
        draw.draw(plans, picture)
        console.print(f"drawn: {picture}", markup=False, highlight=False)
