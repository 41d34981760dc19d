"""Owns `gfkernels demo`: a first look for people, a few verified calls in a table that explains itself."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import typer

_SIZES: Final = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
_WIRE_SIZE: Final = 8 << 20
_TIMEOUT_S: Final = 600.0

_INTRODUCTION = """\
{n} processes each hold an array. allreduce leaves the sum of all {n} in every one of them, as in data-parallel
training, where these arrays are gradients. "ordinary" arrays come from numpy, "registered" ones from gfkernels.empty,
which the processes share. Every result is compared with an exact one, computed apart.
"""

_WHAT_NEXT = """\
What next
  gfkernels bench -n {n}             all sizes, in nccl-tests' columns; --peers adds gloo and MPI, --plot a picture
  gfkernels doctor                 what this machine offers, what it lacks, and what to do about it
  gfkernels plan ring -n 4 --draw plan.svg   how the ranks pass data on, as a picture
  gfkernels run -n 2 script.py     your own script; examples/ has some to start from
In a script: import gfkernels as gf; gf.init(); gf.allreduce(x)"""


def demo_command(
    n: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Ranks to start on this host.")] = 4,
) -> None:
    """See it work: a few verified allreduces between processes of this machine, in a small table."""
    from gfkernels.cli.self_run import launched_world, run_ranks
    from gfkernels.config import Config

    # Once here, rather than by every rank.
    Config.load(None, os.environ)
    if launched_world() is not None:
        try:
            raise typer.Exit(take_part())
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    raise typer.Exit(run_ranks("gfkernels", ["demo"], n, timeout=_TIMEOUT_S))


def take_part() -> int:
    """One rank of the demo.

    Returns:
        The exit code: 0, or 1 where a result was wrong.
    """
    import gfkernels as gf
    from gfkernels.bootstrap import discover
    from gfkernels.cli.bench_measure import Bench, Effort
    from gfkernels.cli.bench_options import Options
    from gfkernels.cli.bench_subjects import Ours

    world = discover(os.environ)
    is_first = world.rank == 0
    if is_first:
        _say(f"gfkernels {gf.__version__}: allreduce between {world.size} processes\n")
        _say(_INTRODUCTION.format(n=world.size))
    effort = Effort(warmup=2, loop=False)
    right = True
    with _compiling(is_first):
        comm = gf.init()
        gf.allreduce(gf.zeros(1024))
    table = _Table(is_first)
    with comm:
        bench = Bench(comm, [Ours(comm, memory, False) for memory in ("ordinary", "registered")], effort)
        for dtype, sizes in (("float32", _SIZES), ("float16", _SIZES[-1:])):
            for nbytes in sizes:
                case = Options(dtype=dtype).case(comm.size, comm.rank).sized(nbytes)
                right &= table.add(bench.measure(case), f"over {comm.transport}" if comm.size > 1 else "alone")
    if world.size > 1:
        # Again over TCP, as between machines, where fewer bytes on the wire are worth the conversion.
        with gf.init(transport="tcp") as comm:
            bench = Bench(comm, [Ours(comm, "ordinary", False)], effort)
            for wire in (None, "float16"):
                case = Options(wire=wire).case(comm.size, comm.rank).sized(_WIRE_SIZE)
                right &= table.add(bench.measure(case), "over tcp" + (f", sent as {wire}" if wire else ""))
    if is_first:
        _say(table.text())
        _say(_WHAT_NEXT.format(n=world.size))
    return 0 if right else 1


class _Table:
    """The rows of the demo."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._rows: list[tuple[str, ...]] = []

    def add(self, rows: Sequence[object], how: str) -> bool:
        """Takes what was measured; whether all of it was right."""
        from gfkernels.cli.bench_measure import Row
        from gfkernels.cli.bench_plot import human

        right = True
        for row in rows:
            assert isinstance(row, Row)
            right &= row.wrong == 0
            cells = (
                human(row.case.nbytes),
                row.case.dtype.name,
                row.by,
                how,
                duration(row.median_us),
                rate(row.busbw) if row.case.n > 1 else "-",
                "✓" if row.wrong == 0 else f"✗ {row.wrong} elements wrong",
            )
            self._rows.append(cells)
            if self._is_shown and sys.stderr.isatty():
                print(f"\r  measured {len(self._rows)} rows", end="\r", file=sys.stderr, flush=True)
        return right

    def text(self) -> str:
        """The table."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("array", "type", "memory", "how", "time", "effective", "correct"):
            right = name in ("array", "time", "effective")
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        for cells in self._rows:
            table.add_row(*cells, style="bold red" if cells[-1][0] == "✗" else "")
        console = Console(width=None if sys.stdout.isatty() else 100)
        with console.capture() as capture:
            console.print(table)
            console.print(
                "  effective: bytes that a perfect algorithm must move per rank, over the time (nccl-tests' busbw)",
                style="dim", highlight=False,
            )  # fmt: skip
        return capture.get()


def duration(microseconds: float) -> str:
    """For people: 12 µs, 3.4 ms."""
    if microseconds < 1000:
        return f"{microseconds:.3g} µs"
    return f"{microseconds / 1e3:.3g} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.3g} s"


def rate(gigabytes: float) -> str:
    """For people: 320 MB/s, 8.1 GB/s."""
    return f"{gigabytes:.1f} GB/s" if gigabytes >= 0.95 else f"{gigabytes * 1e3:.3g} MB/s"


@contextlib.contextmanager
def _compiling(is_first: bool) -> Iterator[None]:
    """Says so while the first start compiles."""
    from gfkernels.native.jit import cache_folder

    # The mark of a cache that is complete; the start then takes a second or two.
    cold = is_first and not any(cache_folder().glob("*.ready"))
    text = "Compiling the data plane for this machine, once; about 15 s"
    start = time.monotonic()
    if cold and sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield
    else:
        if cold:
            _say(f"{text} …")
        yield
    if cold:
        _say(f"Compiled in {time.monotonic() - start:.0f} s; kept in {cache_folder()}\n")


def _say(text: str) -> None:
    from gfkernels.cli.bench_report import say

    say(text)
