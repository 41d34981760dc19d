"""Owns `gfkernels plan`: prints, checks and draws the plan of a collective without running it."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console

from gfkernels.errors import GfkernelsError, UsageError
from gfkernels.plan import draw
from gfkernels.plan.check import check
from gfkernels.plan.choose import PLANS, choose, mean_prescale
from gfkernels.plan.direct import VARIANTS
from gfkernels.plan.model import Plan
from gfkernels.types import DTYPES, DType, ReduceOp

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "barrier")


def _dtype(name: str) -> DType:
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def build(
    name: str,
    *,
    size: int,
    count: int,
    collective: str = "allreduce",
    op: str = "sum",
    dtype: str = "float32",
    wire: str | None = None,
    variant: str = "registered",
    network: bool = False,
    root: int = 0,
    out: bool = False,
    segment_bytes: int | None = None,
    lanes: int | None = None,
) -> list[Plan]:
    """The plans of all ranks, as a communicator would choose them.

    Raises:
        UsageError: a name that does not exist, or a plan that cannot do this.
    """
    if collective not in COLLECTIVES:
        raise UsageError(f"collective {collective!r}: expected one of {', '.join(COLLECTIVES)}")
    if op.upper() not in ReduceOp.__members__:
        raise UsageError(f"op {op!r}: expected one of {', '.join(o.label for o in ReduceOp)}")
    if not 0 <= root < size:
        raise UsageError(f"root {root}: expected 0 <= root < {size}")
    array, travels = _dtype(dtype), _dtype(wire) if wire else None
    wired = travels is not None and travels.name != array.name
    choice = choose(
        collective,
        size=size,
        count=count,
        itemsize=array.itemsize,
        wire_itemsize=travels.itemsize if travels else None,
        wired=wired,
        prescaled=mean_prescale(ReduceOp[op.upper()], array, travels, size)[0] != 1.0,
        same_host=not network,
        variant=variant,
        plan=name,
        out=out,
        root=root,
        segment_bytes=segment_bytes,
        lanes=lanes,
        inline_bytes=0 if variant != "inline" else 1 << 40,
    )
    return [choice.build(rank) for rank in range(size)]


def plan_command(
    name: Annotated[str, typer.Argument(help=f"The algorithm: {', '.join(PLANS)}.")] = "auto",
    n: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Number of ranks.")] = 4,
    count: Annotated[int, typer.Option(min=0, help="Elements of every rank's array.")] = 1000,
    collective: Annotated[str, typer.Option(help=f"One of {', '.join(COLLECTIVES)}.")] = "allreduce",
    op: Annotated[str, typer.Option(help="The reduction.")] = "sum",
    dtype: Annotated[str, typer.Option(help="Element type of the arrays.")] = "float32",
    wire: Annotated[str | None, typer.Option(help="Element type that travels; default: the arrays' own.")] = None,
    variant: Annotated[str, typer.Option(help=f"Way to a local peer's memory: {', '.join(VARIANTS)}.")] = "registered",
    network: Annotated[bool, typer.Option("--network", help="The ranks are on several hosts.")] = False,
    root: Annotated[int, typer.Option(help="Root of a broadcast.")] = 0,
    segment_bytes: Annotated[int | None, typer.Option(min=1, help="Bytes of a message.")] = None,
    lanes: Annotated[int | None, typer.Option(min=1, help="Concurrent pipelines.")] = None,
    rank: Annotated[int, typer.Option(min=0, help="Whose rows to print.")] = 0,
    rows: Annotated[int, typer.Option(min=0, help="Rows to print at most.")] = 60,
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
        # A pipe or a file has no width; 80 columns would cut the spans.
        console = Console(width=140)
    try:
        if variant not in VARIANTS:
            raise UsageError(f"variant {variant!r}: expected one of {', '.join(VARIANTS)}")
        if rank >= n:
            raise UsageError(f"rank {rank}: expected 0 <= rank < {n}")
        plans = build(
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
        if rows:
            console.print(draw.table(plans[rank], limit=rows))
        else:
            console.print(draw.title(plans[rank]), markup=False)
        if prove:
            start = time.perf_counter()
            check(plans)
            steps = sum(len(plan.steps) for plan in plans)
            console.print(
                f"checked: {n} ranks, {steps} rows, 3 calls in a row: right, ordered, free of deadlock "
                f"({time.perf_counter() - start:.2f} s)",
                markup=False,
            )
        if picture:
            draw.draw(plans, picture)
            console.print(f"drawn: {picture}", markup=False)
    except GfkernelsError as error:
        Console(stderr=True).print(f"gfkernels plan: {error}", style="bold red", markup=False)
        raise typer.Exit(2) from None
