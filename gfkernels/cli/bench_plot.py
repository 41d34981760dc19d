"""Owns the picture of a benchmark: time and bus bandwidth over size, ours and the peers'."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

from gfkernels.cli.bench_measure import Row
from gfkernels.cli.bench_report import load, machine
from gfkernels.errors import UnavailableError

_OURS: Final = ("#0b5fa5", "#3aa0d8")
_PEERS: Final = ("#c2571a", "#7a4fa3", "#5f7f2f", "#888888")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P")
_INK: Final = "#333333"


def plot(rows: Sequence[Row], path: str, comm: Any, about: str) -> None:
    """Draws rows of one sweep.

    Args:
        rows: of all subjects and sizes.
        path: ends in .svg or .png.
        comm: whose ranks they are.
        about: one line on what was measured.

    Raises:
        UnavailableError: there is no matplotlib.
    """
    try:
        figure_of = importlib.import_module("matplotlib.figure").Figure
        canvas_of = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
        tick_at = importlib.import_module("matplotlib.ticker")
    except ImportError as error:
        raise UnavailableError(
            f"drawing needs matplotlib, which cannot be loaded: {error}", "pip install 'gfkernels[plot]'"
        ) from None
    figure = figure_of(figsize=(11, 4.8), dpi=144, layout="constrained")
    canvas_of(figure)
    times, bandwidths = figure.subplots(1, 2)
    names = list(dict.fromkeys(row.by for row in rows))
    styles = _styles(rows, names)
    for name in names:
        mine = [row for row in rows if row.by == name]
        sizes = [row.case.nbytes for row in mine]
        label = name if mine[0].is_peer else f"gfkernels, {name}"
        times.plot(sizes, [row.median_us for row in mine], label=label, **styles[name])
        # One rank has no bus: busbw would be 0, which has no place on a logarithmic axis.
        rates = [row.busbw if comm.size > 1 else row.algbw for row in mine]
        bandwidths.plot(sizes, rates, label=label, **styles[name])
    bandwidth = "busbw" if comm.size > 1 else "algbw"
    for axes, title, unit in (
        (times, "time", "µs, lower is better"),
        (bandwidths, bandwidth, "GB/s, higher is better"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{title} ({unit})", loc="left", fontsize=10, color=_INK)
        axes.set_xlabel("bytes of a rank's array", fontsize=9, color=_INK)
        axes.xaxis.set_major_formatter(tick_at.FuncFormatter(lambda value, _: human(value)))
        axes.yaxis.set_major_formatter(tick_at.FuncFormatter(lambda value, _: f"{value:g}"))
        low, high = axes.get_ylim()
        # Within a decade or so there are hardly any major ticks to read values from.
        minor = tick_at.FuncFormatter(lambda value, _: f"{value:g}") if high < 20 * low else tick_at.NullFormatter()
        axes.yaxis.set_minor_formatter(minor)
        axes.tick_params(which="minor", labelsize=7, colors=_INK)
        axes.grid(True, which="major", color="#e3e5e8", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, colors=_INK)
    lines, labels = times.get_legend_handles_labels()
    # Above the axes: wherever it lay inside, some curve would pass under it.
    figure.legend(lines, labels, fontsize=8, frameon=False, loc="outside upper right", ncols=len(labels))
    there = machine()
    ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
    figure.suptitle(f"{about}, {ranks} over {comm.transport}", x=0.01, ha="left", fontsize=12, color=_INK)
    note = f"{there['cpu']}, {there['cores']:g} cores, load {load():.1f} before · medians of one run, all in turns"
    figure.supxlabel(note, x=0.01, ha="left", fontsize=7.5, color="#777777")
    figure.savefig(path)


def _styles(rows: Sequence[Row], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    peers = {row.by for row in rows if row.is_peer}
    ours = [name for name in names if name not in peers]
    styles: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(names):
        palette, k = (_PEERS, i - len(ours)) if name in peers else (_OURS, ours.index(name))
        styles[name] = {
            "color": palette[k % len(palette)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "markersize": 4,
            "linewidth": 1.4 if name in peers else 2.0,
            "linestyle": "--" if name in peers else "-",
        }
    return styles


def human(nbytes: float) -> str:
    """8 -> "8 B", 65536 -> "64 KiB"."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.3g} B"
