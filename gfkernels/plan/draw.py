"""Owns the picture of a plan: ranks and lanes against time, segments by colour, messages as arrows."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from gfkernels.errors import UsageError
from gfkernels.plan.canvas import FONT_PX, Box, Line, Shape, Text, to_png, to_svg
from gfkernels.plan.model import EVERYONE, Plan
from gfkernels.plan.timeline import LATENCY, Bar, Numbering, span, timeline
from gfkernels.types import StepOp

MOST_UNITS: Final = 240.0
"""Time that a picture shows at most, in unit costs: a bar is then four pixels wide."""
SIGNS: Final = {StepOp.COMBINE: "+", StepOp.COPY: "=", StepOp.PUT: "→", StepOp.GET: "←"}
_WORDS: Final = {StepOp.COMBINE: "combine", StepOp.COPY: "copy", StepOp.PUT: "put", StepOp.GET: "get"}
_STRENGTH: Final = {StepOp.COMBINE: 1.0, StepOp.COPY: 0.45, StepOp.PUT: 0.72, StepOp.GET: 0.72}
"""How strong an operation's colour is; the rest is white."""
_LEFT: Final = 92.0
_RIGHT: Final = 24.0
_PLOT_PX: Final = 1060.0
_LANE_PX: Final = 26.0
_BAND_GAP_PX: Final = 18.0
_LEGEND_TOP: Final = 36.0
_LEGEND_ROW_PX: Final = 22.0
_CHARACTER_PX: Final = 6.6
"""Width of a character of the legend's font, generously."""
_ENTER_FILL: Final = "#3b4252"
_GREY: Final = "#8e9db3"
_FAINT: Final = "#666666"
_ARROW: Final = "#444444"
_WAITING: Final = "#9aa0a8"
_MAX_ARROWS: Final = 1500
_MAX_SIGNALS: Final = 150


def colour(part: int, strength: float = 1.0) -> str:
    """A colour per part; neighbours differ much (golden angle)."""
    rgb = colorsys.hls_to_rgb(part * 0.381966 % 1.0, 0.64 if part % 2 else 0.57, 0.58)
    return _mixed(rgb, strength)


def _mixed(rgb: Iterable[float], strength: float) -> str:
    return "#" + "".join(f"{round(255 * (1 - strength * (1 - value))):02x}" for value in rgb)


def _grey(strength: float) -> str:
    return _mixed([int(_GREY[i : i + 2], 16) / 255 for i in (1, 3, 5)], strength)


def check_name(path: str | Path) -> Path:
    """Refuses a file that is no picture."""
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise UsageError(f"cannot draw to {path.name!r}: expected a name that ends in .svg or .png")
    return path


def draw(plans: Sequence[Plan], path: str | Path) -> None:
    """Writes the picture of all ranks' plans.

    Args:
        plans: one per rank.
        path: where to; `.svg` needs nothing else, `.png` needs matplotlib.

    Raises:
        UsageError: another suffix, or a place that cannot be written.
        UnavailableError: PNG without matplotlib.
    """
    path = check_name(path)
    shapes, width, height = picture(plans)
    try:
        if path.suffix == ".svg":
            path.write_text(to_svg(shapes, width, height), encoding="utf-8")
        else:
            to_png(shapes, width, height, path)
    except OSError as error:
        raise UsageError(f"cannot draw to {str(path)!r}: {error.strerror or error}") from None


def svg(plans: Sequence[Plan]) -> str:
    """The picture as SVG text."""
    return to_svg(*picture(plans))


def heading(plan: Plan) -> tuple[str, str]:
    """What a plan is: (in short, its parameters and hash)."""
    shown = []
    for key, value in plan.parameters:
        if value is True:
            shown.append(key)
        elif value is not False and not isinstance(value, tuple):
            shown.append(f"{key} {value}")
    arrays = f" in {len(plan.parameter('counts'))} arrays" if plan.collective == "allreduce_many" else ""
    ranks = f"{plan.size} rank{'s' if plan.size > 1 else ''}"
    return f"{plan.name} {plan.collective}, {ranks}, {plan.count} elements{arrays}", ", ".join(
        [*shown, f"plan {plan.hash}"]
    )


def title(plan: Plan) -> str:
    """One line on what a plan is."""
    return "{}: {}".format(*heading(plan))


class _Layout:
    """Where a time and a lane lie on the picture."""

    def __init__(self, plans: Sequence[Plan], bars: Sequence[Bar], top: float, cut: bool) -> None:
        self.total = min(span(bars), MOST_UNITS) if cut else span(bars)
        self.scale = _PLOT_PX / self.total
        self.tops: dict[tuple[int, int], float] = {}
        self.bands: list[tuple[int, float, float]] = []
        y = self.top = top
        for plan in plans:
            first = y
            for lane in range(max(1, plan.n_lanes)):
                self.tops[plan.rank, lane] = y
                y += _LANE_PX
            self.bands.append((plan.rank, first, y))
            y += _BAND_GAP_PX
        self.bottom = y - _BAND_GAP_PX + 6

    def x(self, time: float) -> float:
        return _LEFT + min(time, self.total) * self.scale


def picture(plans: Sequence[Plan]) -> tuple[list[Shape], float, float]:
    """(shapes, width, height) of all ranks' plans."""
    bars = timeline(plans, until=MOST_UNITS)
    cut = len(bars) < sum(len(plan.steps) for plan in plans)
    numbering = Numbering.of(plans)
    short, details = heading(plans[0])
    width = _LEFT + _PLOT_PX + _RIGHT
    shapes: list[Shape] = [Text(14, 24, short, 14, bold=True)]
    details_at = 14 + 8.9 * len(short) + 14
    shapes.append(Text(details_at, 24, _fitting(details, width - details_at - 14), colour=_FAINT))
    legend, top = _legend(bars, numbering, len(plans), width)
    shapes += legend
    at = _Layout(plans, bars, top, cut)
    for rank, first, last in at.bands:
        shapes.append(Box(_LEFT, first, _PLOT_PX, last - first, "#f3f4f6"))
        shapes.append(Text(14, (first + last) / 2 + 4, f"rank {rank}", bold=True))
    for (rank, lane), y in at.tops.items():
        if (rank, 1) in at.tops:
            shapes.append(Text(_LEFT - 8, y + 17, f"lane {lane}", 9, "end", _FAINT))
    shapes += _axis(at, cut)
    # Below the bars, so that no label is crossed.
    arrows = [_arrow(bar, peer, at) for bar, peer in _messages(bars, len(plans)) if bar.end + LATENCY <= at.total]
    shapes += arrows if len(arrows) <= _MAX_ARROWS else []
    for bar in bars:
        shapes += _bar(bar, at, numbering.word)
    return shapes, width, at.bottom + 44


def _fitting(text: str, width: float) -> str:
    most = max(4, int(width / _CHARACTER_PX))
    return text if len(text) <= most else text[: most - 3] + "..."


def _legend(bars: Sequence[Bar], numbering: Numbering, size: int, width: float) -> tuple[list[Shape], float]:
    """(what the signs mean, as far as they occur; where the picture begins)."""
    shapes: list[Shape] = []
    x, y = 14.0, _LEGEND_TOP

    def entry(swatch: float, text: str) -> float:
        """Room for a swatch and its text; where it begins."""
        nonlocal x, y
        needs = swatch + 6 + _CHARACTER_PX * len(text) + 14
        if x + needs > width:
            x, y = 14.0, y + _LEGEND_ROW_PX
        start = x
        shapes.append(Text(start + swatch + 6, y + 11, text))
        x += needs
        return start

    ops = {bar.op for bar in bars}
    for op, sign in SIGNS.items():
        if op in ops:
            start = entry(18, _WORDS[op])
            shapes += [
                Box(start, y, 18, 14, _grey(_STRENGTH[op]), "#333333"),
                Text(start + 9, y + 11, sign, anchor="middle"),
            ]
    if StepOp.ENTER in ops:
        start = entry(18, "enter (all ranks meet)")
        shapes.append(Box(start, y, 18, 14, _ENTER_FILL))
    if any(bar.op == StepOp.WAIT and bar.end > bar.start for bar in bars):
        start = entry(22, "waiting")
        shapes.append(Line(start, y + 7, start + 22, y + 7, _WAITING, 1.4, dashed=True))
    if _messages(bars, size):
        start = entry(22, "message" if StepOp.PUT in ops else "signal")
        shapes.append(Line(start, y + 7, start + 22, y + 7, _ARROW, 0.9, arrow=True))
    parts = sorted({bar.part for bar in bars if bar.op in SIGNS})[:3]
    if parts:
        start = entry(20.0 * len(parts), f"colour and number: {numbering.word}")
        for i, part in enumerate(parts):
            shapes += [
                Box(start + 20 * i, y, 18, 14, colour(part), "#333333"),
                Text(start + 20 * i + 9, y + 11, str(part), 10, "middle"),
            ]
    return shapes, y + 32


def _axis(at: _Layout, cut: bool) -> list[Shape]:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100) if at.total / s <= 24)
    out: list[Shape] = []
    for tick in range(0, int(at.total) + 1, step):
        x = at.x(tick)
        out.append(Line(x, at.top, x, at.bottom, "#d5d9df", 0.7))
        out.append(Text(x, at.bottom + 15, str(tick), 10, "middle", _FAINT))
    label = f"time: a full segment's work takes 1, a message {LATENCY}"
    if cut:
        label += f"; cut off at {MOST_UNITS:.0f}, the plan goes on"
    out.append(Text(_LEFT, at.bottom + 33, label, 10, colour=_FAINT))
    return out


def _bar(bar: Bar, at: _Layout, word: str) -> list[Shape]:
    if bar.start >= at.total:
        return []
    top = at.tops[bar.rank, bar.lane]
    x, width = at.x(bar.start), at.x(bar.end) - at.x(bar.start)
    tip = f"rank {bar.rank}, row {bar.row}: {bar.op.name}, {word} {bar.part}, {bar.count} elements"
    if bar.op in (StepOp.SIGNAL, StepOp.WAIT):
        if width < 0.5:
            return []
        y = top + _LANE_PX / 2
        tip = f"rank {bar.rank}, row {bar.row}: {bar.op.name}, peer {bar.peer if bar.peer >= 0 else 'all'}"
        return [Line(x, y, x + width, y, _WAITING, 1.4, dashed=True, tip=tip)]
    if bar.op == StepOp.ENTER:
        return [Box(x, top + 3, max(2.0, width), _LANE_PX - 6, _ENTER_FILL, tip=f"rank {bar.rank}: ENTER")]
    shapes: list[Shape] = [
        Box(x, top + 3, width, _LANE_PX - 6, colour(bar.part, _STRENGTH[bar.op]), "#333333", tip),
    ]
    for label in (f"{SIGNS[bar.op]}{bar.part}", SIGNS[bar.op]):
        if width > 0.72 * FONT_PX * len(label) + 2:
            shapes.append(Text(x + width / 2, top + 17, label, 10, "middle"))
            break
    return shapes


def _messages(bars: Sequence[Bar], size: int) -> list[tuple[Bar, int]]:
    """(row, to whom): PUTs, or where there are none, a moderate number of SIGNALs."""
    puts = [(bar, bar.peer) for bar in bars if bar.op == StepOp.PUT]
    if puts:
        return puts
    signals = [bar for bar in bars if bar.op == StepOp.SIGNAL]
    each = [
        (bar, q) for bar in signals for q in (range(size) if bar.peer == EVERYONE else (bar.peer,)) if q != bar.rank
    ]
    return each if len(each) <= _MAX_SIGNALS else []


def _arrow(bar: Bar, peer: int, at: _Layout) -> Line:
    lane = bar.lane if (peer, bar.lane) in at.tops else 0
    down = at.tops[peer, lane] > at.tops[bar.rank, bar.lane]
    y1 = at.tops[bar.rank, bar.lane] + (_LANE_PX - 3 if down else 3)
    y2 = at.tops[peer, lane] + (3 if down else _LANE_PX - 3)
    return Line(at.x(bar.end), y1, at.x(bar.end + LATENCY), y2, _ARROW, 0.9, arrow=True)
