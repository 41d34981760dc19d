"""Owns `gfkernels bench`: its options, and who starts the ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from gfkernels.cli.bench_case import COLLECTIVES
from gfkernels.cli.bench_options import MEMORIES, OPS, WIRES, Options
from gfkernels.errors import UsageError
from gfkernels.types import DTYPES

_RANK_MODULE = "gfkernels.cli.bench_rank"


def bench_command(
    collective: Annotated[str, typer.Argument(help=f"One of {', '.join(COLLECTIVES)}.")] = "allreduce",
    n: Annotated[
        int | None,
        typer.Option("-n", "--ranks", min=1, help="Ranks to start on this host (2 unless given)."),
    ] = None,
    first: Annotated[str, typer.Option("-b", "--begin", help="Smallest size in bytes, such as 8, 64K, 1M.")] = "8",
    last: Annotated[str, typer.Option("-e", "--end", help="Largest size.")] = "64M",
    factor: Annotated[float, typer.Option("-f", "--factor", help="From one size to the next.")] = 4.0,
    dtype: Annotated[str, typer.Option("--dtype", "-d", help=f"One of {', '.join(DTYPES)}.")] = "float32",
    op: Annotated[str, typer.Option("--op", "-o", help=f"One of {', '.join(OPS)}.")] = "sum",
    wire: Annotated[str | None, typer.Option(help=f"What travels: {' or '.join(WIRES)}; else the dtype.")] = None,
    memory: Annotated[str, typer.Option(help=f"Where the arrays lie: {', '.join(MEMORIES)}.")] = "both",
    out_of_place: Annotated[bool, typer.Option("--out-of-place", help="allreduce into another array.")] = False,
    persistent: Annotated[bool, typer.Option("--persistent", help="allreduce through plan_allreduce.")] = False,
    transport: Annotated[str | None, typer.Option(help="auto, shm, cma, verbs or tcp.")] = None,
    plan: Annotated[str | None, typer.Option(help="auto, direct, ring or recursive_doubling.")] = None,
    segment_bytes: Annotated[str | None, typer.Option(help="Bytes of one message of a pipeline.")] = None,
    staging_bytes: Annotated[str | None, typer.Option(help="Bytes of a rank's staging area.")] = None,
    lanes: Annotated[str | None, typer.Option(help="Pipelines that run concurrently.")] = None,
    iters: Annotated[int, typer.Option(min=0, help="Calls per row; 0: what fits 0.3 s, 10 to 500.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Calls before them.")] = 3,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Verify against exact results first.")] = True,
    peers: Annotated[bool, typer.Option("--peers", help="Measure gloo and MPI in the same run, in turns.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Append a JSON line per row; -: to stdout.")
    ] = None,
    plot_file: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw bandwidth and time: .svg or .png.")
    ] = None,
) -> None:
    """Measure a collective over a sweep of sizes, verified, in nccl-tests' columns.

    Starts its own ranks on this host. Inside a job (gfkernels run, torchrun, mpiexec, srun) it takes part as a rank.
    Exit code 1: a result was wrong.
    """
    settings = {
        name: value
        for name, value in (
            ("transport", transport),
            ("plan", plan),
            ("segment_bytes", segment_bytes),
            ("staging_bytes", staging_bytes),
            ("lanes", lanes),
        )
        if value is not None
    }
    options = Options(
        collective, first, last, factor, dtype, op, wire, memory, out_of_place, persistent, iters, warmup, check,
        json_file, plot_file, settings,
    )  # fmt: skip
    options.validate()
    raise typer.Exit(_run(options, n, peers))


def _run(options: Options, n: int | None, peers: bool) -> int:
    import dataclasses

    from gfkernels.cli.self_run import launched_world, run_ranks

    world = launched_world()
    if world is not None:
        from gfkernels.cli.bench_peers import peers_inside
        from gfkernels.cli.bench_rank import take_part

        if n is not None and n != world.size:
            raise UsageError(f"-n {n}: this process is a rank of a job of {world.size} ({world.source}): leave out -n")
        return take_part(dataclasses.replace(options, peers=peers_inside()) if peers else options)
    ranks = 2 if n is None else n
    if not peers:
        return run_ranks(_RANK_MODULE, [options.dumps()], ranks)
    from gfkernels.cli.bench_peers import find_peers, run_under_mpi

    found = find_peers()
    words = [dataclasses.replace(options, peers=found.peers).dumps()]
    if found.launcher:
        return run_under_mpi(found.launcher, _RANK_MODULE, words, ranks)
    return run_ranks(_RANK_MODULE, words, ranks)
