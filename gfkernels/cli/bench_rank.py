"""Owns a rank of `gfkernels bench`: joins the others, measures, and on rank 0 prints and writes the results."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Final

import numpy as np

import gfkernels as gf
from gfkernels.bootstrap import discover
from gfkernels.cli.bench_case import Case
from gfkernels.cli.bench_measure import Bench, Effort, Row
from gfkernels.cli.bench_options import Options
from gfkernels.cli.bench_report import Table, heading, json_line, say, side_by_side
from gfkernels.cli.bench_subjects import Ours, Subject, peers
from gfkernels.errors import ConfigError, GfkernelsError, UsageError

_LONG_SWEEP: Final = 4
_EXPLAINED: Final = (
    "# by: registered = arrays from gfkernels.empty, ordinary = numpy's; size: the larger of a rank's input and output",
    "# time: median of single calls, each the longest of the ranks; loop: per call, of many in a row",
)


def take_part(options: Options) -> int:
    """Measures as one of the ranks that a launcher started.

    Returns:
        The exit code: 0, or 1 where a result was wrong.
    """
    settings: dict[str, Any] = dict(options.settings)
    comm = gf.init(**settings)
    with comm:
        found, reasons = peers(comm, options.peers) if options.peers else ([], {})
        ours: list[Subject] = [Ours(comm, memory, options.persistent) for memory in options.memories]
        cases = options.cases(comm.size, comm.rank)
        _check_memory(comm, cases[-1], len(ours) + len(found))
        bench = Bench(comm, [*ours, *found], Effort(options.iters, options.warmup, options.check), _common_seed(comm))
        if comm.rank != 0:
            rows = [row for case in cases for row in bench.measure(case)]
        else:
            rows = _Reporter(comm, options, reasons).run(bench, cases)
    return 1 if any(row.wrong for row in rows) else 0


class _Reporter:
    """Rank 0's side of the run: the table as it grows, then the summary, JSON and picture."""

    def __init__(self, comm: gf.Communicator, options: Options, reasons: dict[str, str]) -> None:
        self._comm, self._options, self._reasons = comm, options, reasons

    def run(self, bench: Bench, cases: Sequence[Case]) -> list[Row]:
        """Measures everything."""
        options = self._options
        table = Table(bench.names, with_ratio=len(bench.names) > 1)
        self._say(*heading(self._comm, options.about()))
        self._say(*(f"# {name} is left out: {why}" for name, why in self._reasons.items()))
        self._say(*_EXPLAINED, "#", *table.heading())
        rows: list[Row] = []
        with _json_file(options.json_file) as lines, _progress(len(cases), self._say) as (advance, show):
            for case in cases:
                found = bench.measure(case)
                for row in found:
                    show(table.line(row, found[0]))
                    if lines is not None:
                        lines.write(json_line(row, self._comm, options.extra()) + "\n")
                        lines.flush()
                rows += found
                advance()
        self._finish(bench, rows)
        return rows

    def _finish(self, bench: Bench, rows: list[Row]) -> None:
        options = self._options
        self._say(*side_by_side(rows), "#")
        self._say(*(f"# {name} is left out: {why}" for name, why in bench.refusals.items()))
        wrong = sum(row.wrong or 0 for row in rows)
        if wrong:
            self._say(f"# WRONG: {wrong} elements in {sum(bool(row.wrong) for row in rows)} of {len(rows)} rows")
        elif options.check and options.collective != "barrier":
            self._say(f"# checked against exact results: {len(rows)} rows, every element right")
        else:
            self._say("# results were not checked")
        if options.json_file not in (None, "-"):
            self._say(f"# appended to {options.json_file}: {len(rows)} JSON lines")
        if options.plot_file:
            from gfkernels.cli.bench_plot import plot

            plot(rows, options.plot_file, self._comm, options.about())
            self._say(f"# drawn: {options.plot_file}")

    def _say(self, *lines: str) -> None:
        say(*lines, to_stderr=self._options.json_file == "-")


def _common_seed(comm: gf.Communicator) -> int:
    # An allreduce, which every plan can do, where a broadcast would be natural.
    seed = np.array([int.from_bytes(os.urandom(4), "little") if comm.rank == 0 else 0], np.int64)
    comm.allreduce(seed)
    return int(seed[0])


def _check_memory(comm: gf.Communicator, largest: Case, subjects: int) -> None:
    from gfkernels.transport.arena_memory import available_nbytes

    arrays = 1 if largest.in_place else 2
    needed = comm.local_size * subjects * arrays * largest.nbytes
    available, what = available_nbytes()
    # What is free may differ a little between ranks; all of them give up, or none.
    is_short = np.array([needed > available], np.int32)
    comm.allreduce(is_short, "max")
    if is_short[0]:
        raise UsageError(
            f"-e {largest.nbytes} bytes: {subjects} subjects of {comm.local_size} ranks need {needed >> 20} MiB for "
            f"arrays of that size, and there are {available >> 20} MiB: {what}. Take a smaller -e, or one --memory"
        )


@contextlib.contextmanager
def _json_file(path: str | None) -> Iterator[IO[str] | None]:
    if path is None:
        yield None
    elif path == "-":
        yield sys.stdout
    else:
        with open(path, "a", encoding="utf-8") as file:
            yield file


@contextlib.contextmanager
def _progress(total: int, say: Callable[[str], None]) -> Iterator[tuple[Callable[[], None], Callable[[str], None]]]:
    """A bar on stderr, where that is a terminal and the sweep is long: how to move it, and how to print beside it."""
    if total < _LONG_SWEEP or not sys.stderr.isatty():
        yield (lambda: None), say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("sweep", total=total)

        def above(line: str) -> None:
            # On the same terminal a line has to go above the bar; the terminal itself wraps long ones.
            progress.console.print(line, soft_wrap=True, markup=False, highlight=False)

        yield (lambda: progress.advance(task)), above if sys.stdout.isatty() else say


def _is_first() -> bool:
    try:
        return discover(os.environ).rank == 0
    except ConfigError:
        return True


def main(arguments: Sequence[str]) -> int:
    """Entry of the ranks that `gfkernels bench` starts: one argument, the options as JSON."""
    try:
        return take_part(Options.loads(arguments[0]))
    except KeyboardInterrupt:
        return 130
    except GfkernelsError as error:
        # The others failed with it, or because of it; one message is enough.
        if _is_first():
            print(f"gfkernels bench: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UsageError | ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
