"""Owns how results are shown: nccl-tests' table, the peers side by side, and JSON lines that name their origin."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np

from gfkernels import Config, __version__
from gfkernels.bootstrap.hosts import cores_available, this_host
from gfkernels.cli.bench_measure import Row

_SECRETS: Final = ("secret", "secret_file")
_SCHEMA: Final = 1
_BUSY: Final = 0.5
"""Programs per core from which a warning is due."""


@cache
def commit() -> str | None:
    """The git commit that the package is run from, "-dirty" where files differ; None outside a checkout."""
    package = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(package), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        # Only where the sources themselves are tracked: an installed copy may lie below somebody else's checkout.
        git("ls-files", "--error-unmatch", "__init__.py")
        dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no", ".") else ""
        return git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        return None


@cache
def machine() -> dict[str, Any]:
    """What runs this, for people and for JSON."""
    host = this_host()
    return {
        "host": host.hostname,
        "cpu": cpu_model(),
        "cores": cores_available([host]),
        "memory_gib": round(_memory_gib(), 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Of what takes part."""
    found = {"gfkernels": __version__, "python": platform.python_version()}
    for name in ("numba", "llvmlite", "numpy", "ml_dtypes"):
        found[name] = metadata.version(name)
    return found


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model") and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError, AttributeError):
        return 0.0


def changed_settings(config: Config) -> dict[str, Any]:
    """The settings that are not at their defaults, without secrets."""
    defaults = Config()
    fields = [item.name for item in dataclasses.fields(Config) if item.name not in (*_SECRETS, "job_id")]
    return {name: getattr(config, name) for name in fields if getattr(config, name) != getattr(defaults, name)}


def heading(comm: Any, about: str) -> list[str]:
    """The comment lines above the table."""
    there, tools = machine(), versions()
    source = commit()
    built = f" (commit {source[:12]}{'-dirty' if source.endswith('-dirty') else ''})" if source else ""
    others = ", ".join(f"{name} {version}" for name, version in tools.items() if name != "gfkernels")
    hosts = "" if comm.local_size == comm.size else f", {comm.local_size} of them on this host"
    lines = [
        f"# gfkernels {__version__}{built}, {others}",
        f"# {there['cpu']}, {there['cores']:g} cores, {there['memory_gib']:g} GiB, {there['system']}",
        f"# {comm.size} rank{'s' * (comm.size != 1)}{hosts} over {comm.transport}; {about}",
    ]
    settings = changed_settings(comm.config)
    if settings:
        lines.append("# settings: " + ", ".join(f"{name}={value}" for name, value in settings.items()))
    lines += [f"# not used: {why}" for why in comm.passed_over]
    if there["cores"] < comm.local_size:
        lines.append(f"# {comm.local_size} ranks share {there['cores']:g} cores: every wait costs a switch of tasks")
    if load() > _BUSY * there["cores"]:
        lines.append(f"# load average {load():.1f}: other programs use the cores too, so times are longer and vary")
    return lines


@cache
def load() -> float:
    """Programs that wanted a core in the last minute, ours not yet among them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


_COLUMNS: Final = (
    ("size", "(B)", 11),
    ("count", "(items)", 10),
    ("type", "", 9),
    ("op", "", 5),
    ("by", "", 16),
    ("time", "(us)", 9),
    ("loop", "(us)", 9),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("#wrong", "", 7),
)


class Table:
    """The lines of nccl-tests' table, one at a time."""

    def __init__(self, names: Sequence[str], *, with_ratio: bool) -> None:
        """Makes a table for rows by these names, with or without a column that compares rows of one size."""
        by = max(map(len, names)) + 1
        columns = tuple((name, unit, by if name == "by" else width) for name, unit, width in _COLUMNS)
        self._columns = (*columns, ("ratio", "(time)", 8)) if with_ratio else columns
        self._with_ratio = with_ratio

    def heading(self) -> list[str]:
        """Names, then units."""
        names = "".join(f"{name:>{width}}" for name, _, width in self._columns) + "  plan"
        units = "".join(f"{unit:>{width}}" for _, unit, width in self._columns)
        return ["#" + names[1:], "#" + units[1:]]

    def line(self, row: Row, first: Row) -> str:
        """One row; the ratio is its time over the first row's of the same case."""
        case = row.case
        moves = case.collective != "barrier"
        cells = [
            str(case.nbytes) if moves else "-",
            str(case.count) if moves else "-",
            case.dtype.name if moves else "-",
            case.op if case.collective in ("allreduce", "reduce_scatter") else "-",
            row.by,
            number(row.median_us),
            "-" if row.loop_us is None else number(row.loop_us),
            f"{row.algbw:.3f}" if moves else "-",
            f"{row.busbw:.3f}" if moves else "-",
            "-" if row.wrong is None else str(row.wrong),
        ]
        if self._with_ratio:
            cells.append(ratio(row.median_us / first.median_us))
        text = "".join(f"{cell:>{width}}" for cell, (_, _, width) in zip(cells, self._columns, strict=True))
        plan = f"  {row.plan} {row.plan_hash}" if row.plan_hash else ""
        return text + plan


def say(*lines: str, to_stderr: bool = False) -> None:
    """Prints lines at once; to a reader that has gone (`| head`), silently."""
    try:
        for line in lines:
            print(line, file=sys.stderr if to_stderr else sys.stdout, flush=True)
    except BrokenPipeError:
        # The other ranks are in the middle of it; nothing but the output is lost.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def number(value: float) -> str:
    """Microseconds with about four digits."""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def ratio(value: float) -> str:
    """A quotient of times."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def side_by_side(rows: Sequence[Row]) -> list[str]:
    """One line per size with everybody's time and its ratio to the first's; [] where the table's own ratio says it."""
    names = list(dict.fromkeys(row.by for row in rows))
    if len(names) < 3:
        return []
    lines = ["", "# time (us) side by side; in brackets: how many times that of " + names[0]]
    lines.append("#" + f"{'size (B)':>10}" + "".join(f"{name:>21}" for name in names))
    for nbytes in dict.fromkeys(row.case.nbytes for row in rows):
        found = {row.by: row.median_us for row in rows if row.case.nbytes == nbytes}
        cells = []
        for name in names:
            times = f"({ratio(found[name] / found[names[0]])})" if name in found and names[0] in found else ""
            cells.append(f"{number(found[name]):>12} {times:>8}" if name in found else f"{'-':>21}")
        lines.append(f"{nbytes:>11}" + "".join(cells))
    return lines


def json_line(row: Row, comm: Any, extra: Mapping[str, Any]) -> str:
    """One row as a line of JSON, with all that is needed to compare it later."""
    case, times = row.case, row.times_us
    low, high = np.percentile(times, [5, 95])
    record = {
        "schema": _SCHEMA,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "load": round(load(), 2),
        "ranks": comm.size,
        "local_ranks": comm.local_size,
        "transport": comm.transport if not row.is_peer else None,
        "config": changed_settings(comm.config),
        **extra,
        "by": row.by,
        "peer": row.is_peer,
        "collective": case.collective,
        "op": case.op,
        "dtype": case.dtype.name,
        "wire": case.wire and case.wire.name,
        "in_place": case.in_place,
        "size_bytes": case.nbytes,
        "count": case.count,
        "iters": len(times),
        "time_us": {
            "median": round(row.median_us, 3),
            "min": round(float(times.min()), 3),
            "mean": round(float(times.mean()), 3),
            "p05": round(float(low), 3),
            "p95": round(float(high), 3),
        },
        "loop_us": row.loop_us and round(row.loop_us, 3),
        "algbw_gbs": round(row.algbw, 4),
        "busbw_gbs": round(row.busbw, 4),
        "wrong": row.wrong,
        "plan": row.plan or None,
        "plan_hash": row.plan_hash or None,
        "path": row.path or None,
    }
    return json.dumps(record)
