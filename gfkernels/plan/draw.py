"""Owns the picture of a plan: ranks and lanes against time, segments by colour, messages as arrows; and a text table."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import escape

from gfkernels.errors import UnavailableError, UsageError
from gfkernels.plan.model import EVERYONE, Plan
from gfkernels.plan.timeline import LATENCY, Bar, span, timeline
from gfkernels.types import N_BUFFERS, Buffer, StepOp

if TYPE_CHECKING:
    from rich.table import Table

_LEFT: Final = 92
_TOP: Final = 74
_LANE_PX: Final = 26
_BAND_GAP_PX: Final = 16
_PLOT_PX: Final = 1060
_ENTER_FILL: Final = "#3b4252"
_MAX_ARROWS: Final = 1500
_LABELS: Final = {StepOp.COMBINE: "+", StepOp.COPY: "=", StepOp.PUT: "→", StepOp.GET: "←"}
_LEGEND: Final = (
    ("+", "combine", 1.0),
    ("=", "copy", 0.5),
    ("→", "put", 0.75),
    ("←", "get", 0.75),
)
_OPEN: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11">'
    '<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0,0 L6,3 L0,6 z" fill="#333"/></marker></defs>'
)
_OPACITY: Final = {StepOp.COMBINE: 1.0, StepOp.COPY: 0.5, StepOp.PUT: 0.75, StepOp.GET: 0.75}


def colour(segment: int) -> str:
    """A colour per segment; neighbours differ much (golden angle)."""
    red, green, blue = colorsys.hls_to_rgb(segment * 0.381966 % 1.0, 0.62 if segment % 2 else 0.54, 0.58)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def draw(plans: Sequence[Plan], path: str | Path) -> None:
    """Writes the picture of all ranks' plans.

    Args:
        plans: one per rank.
        path: where to; `.svg` needs nothing else, `.png` needs matplotlib.

    Raises:
        UsageError: another suffix.
        UnavailableError: PNG without matplotlib.
    """
    path = Path(path)
    if path.suffix == ".svg":
        path.write_text(svg(plans), encoding="utf-8")
    elif path.suffix == ".png":
        _png(plans, path)
    else:
        raise UsageError(f"cannot draw to {path.name!r}: expected a name that ends in .svg or .png")


def title(plan: Plan) -> str:
    """One line on what a plan is."""
    shown = ", ".join(f"{key}={value}" for key, value in plan.parameters if key not in ("counts", "items", "wires"))
    return f"{plan.name} {plan.collective}, {plan.size} ranks, {plan.count} elements ({shown}) · plan {plan.hash}"


class _Layout:
    """Where a time and a lane lie on the picture."""

    def __init__(self, plans: Sequence[Plan], bars: Sequence[Bar]) -> None:
        self.total = span(bars)
        self.scale = _PLOT_PX / self.total
        self.tops: dict[tuple[int, int], float] = {}
        self.bands: list[tuple[int, float, float]] = []
        y = float(_TOP)
        for plan in plans:
            first = y
            for lane in range(max(1, plan.n_lanes)):
                self.tops[plan.rank, lane] = y
                y += _LANE_PX
            self.bands.append((plan.rank, first, y))
            y += _BAND_GAP_PX
        self.height = y + 34
        self.width = _LEFT + _PLOT_PX + 24

    def x(self, time: float) -> float:
        return _LEFT + time * self.scale


def svg(plans: Sequence[Plan]) -> str:
    """The picture as SVG text."""
    bars = timeline(plans)
    at = _Layout(plans, bars)
    out = [
        _OPEN.format(width=f"{at.width:.0f}", height=f"{at.height:.0f}"),
        f'<rect width="{at.width:.0f}" height="{at.height:.0f}" fill="#ffffff"/>',
        _heading(plans[0]),
        *_legend(),
    ]
    for rank, top, bottom in at.bands:
        out.append(
            f'<rect x="{_LEFT}" y="{top:.1f}" width="{_PLOT_PX}" height="{bottom - top:.1f}" fill="#f4f5f7"/>'
            f'<text x="14" y="{(top + bottom) / 2 + 4:.1f}" font-weight="bold">rank {rank}</text>'
        )
    for (_, lane), top in at.tops.items():
        out.append(
            f'<text x="{_LEFT - 8}" y="{top + 17:.1f}" fill="#777" text-anchor="end" font-size="9">{lane}</text>'
        )
    out += _axis(at)
    out += [_bar(bar, at) for bar in bars]
    arrows = [bar for bar in bars if bar.op == StepOp.PUT and bar.peer >= 0]
    if len(arrows) <= _MAX_ARROWS:
        opacity = 0.7 if len(arrows) < 120 else 0.3
        out += [_arrow(bar, at, opacity) for bar in arrows]
    out.append("</svg>")
    return "\n".join(out) + "\n"


def _heading(plan: Plan) -> str:
    name, _, rest = title(plan).partition(" (")
    return (
        f'<text x="14" y="24" font-size="14" font-weight="bold">{escape(name)}'
        f'<tspan font-size="11" font-weight="normal" fill="#555" dx="8">({escape(_short(rest))}</tspan></text>'
    )


def _short(text: str, limit: int = 150) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _legend() -> list[str]:
    out = []
    x = 14.0
    for sign, name, opacity in _LEGEND:
        out.append(
            f'<rect x="{x:.0f}" y="36" width="18" height="14" fill="{colour(1)}" fill-opacity="{opacity}" stroke="#333" '
            f'stroke-width="0.6"/><text x="{x + 9:.0f}" y="47" text-anchor="middle">{sign}</text>'
            f'<text x="{x + 23:.0f}" y="47">{name}</text>'
        )
        x += 92
    out.append(f'<rect x="{x:.0f}" y="36" width="18" height="14" fill="{_ENTER_FILL}"/>')
    out.append(f'<text x="{x + 23:.0f}" y="47">enter</text>')
    x += 92
    notes = "dotted: waiting · colour and number: segment · arrows: messages · time in unit costs of a full segment"
    out.append(f'<text x="{x:.0f}" y="47" fill="#555">{notes}</text>')
    return out


def _axis(at: _Layout) -> list[str]:
    bottom = at.height - 34
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**4, 10**5, 10**6) if at.total / s <= 24)
    out = []
    for tick in range(0, int(at.total) + 1, step):
        x = at.x(tick)
        out.append(
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#d9dce1" stroke-width="0.7"/>'
            f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle" fill="#555">{tick}</text>'
        )
    return out


def _bar(bar: Bar, at: _Layout) -> str:
    top = at.tops[bar.rank, bar.lane]
    x, width = at.x(bar.start), (bar.end - bar.start) * at.scale
    tip = f"<title>rank {bar.rank}, row {bar.row}: {bar.op.name}, segment {bar.segment}, {bar.count} elements</title>"
    if bar.op in (StepOp.SIGNAL, StepOp.WAIT):
        if width < 0.5:
            return ""
        y = top + _LANE_PX / 2
        return (
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x + width:.1f}" y2="{y:.1f}" stroke="#9aa0a8" stroke-width="1.4" '
            f'stroke-dasharray="2 3">{tip}</line>'
        )
    if bar.op == StepOp.ENTER:
        return (
            f'<rect x="{x:.1f}" y="{top + 2:.1f}" width="{max(2.0, width):.1f}" height="{_LANE_PX - 4}" fill="{_ENTER_FILL}">'
            f"{tip}</rect>"
        )
    text = ""
    if width > 9:
        label = f"{_LABELS[bar.op]}{bar.segment}" if width > 22 else _LABELS[bar.op]
        text = f'<text x="{x + width / 2:.1f}" y="{top + 17:.1f}" text-anchor="middle" font-size="10">{label}</text>'
    return (
        f'<rect x="{x:.1f}" y="{top + 3:.1f}" width="{width:.1f}" height="{_LANE_PX - 6}" fill="{colour(bar.segment)}" '
        f'fill-opacity="{_OPACITY[bar.op]}" stroke="#333" stroke-width="0.6">{tip}</rect>{text}'
    )


def _arrow(bar: Bar, at: _Layout, opacity: float) -> str:
    lane = bar.lane if (bar.peer, bar.lane) in at.tops else 0
    down = at.tops[bar.peer, lane] > at.tops[bar.rank, bar.lane]
    y1 = at.tops[bar.rank, bar.lane] + (_LANE_PX - 3 if down else 3)
    y2 = at.tops[bar.peer, lane] + (3 if down else _LANE_PX - 3)
    return (
        f'<line x1="{at.x(bar.end):.1f}" y1="{y1:.1f}" x2="{at.x(bar.end + LATENCY):.1f}" y2="{y2:.1f}" stroke="#333" '
        f'stroke-width="0.9" stroke-opacity="{opacity}" marker-end="url(#tip)"/>'
    )


def _png(plans: Sequence[Plan], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UnavailableError(
            "drawing a PNG needs matplotlib, which is not installed", "Install gfkernels[plot], or draw to a .svg file"
        ) from None
    bars = timeline(plans)
    at = _Layout(plans, bars)
    figure: Any = Figure(figsize=(at.width / 90, at.height / 90), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for bar in bars:
        y, height = at.tops[bar.rank, bar.lane] + 3, _LANE_PX - 6
        if bar.op == StepOp.WAIT and bar.end > bar.start:
            axes.plot([bar.start, bar.end], [y + height / 2] * 2, ":", color="#9aa0a8", lw=1.2)
        elif bar.op in _OPACITY or bar.op == StepOp.ENTER:
            fill = _ENTER_FILL if bar.op == StepOp.ENTER else colour(bar.segment)
            look = {"facecolor": fill, "alpha": _OPACITY.get(bar.op, 1.0), "edgecolor": "#333", "linewidth": 0.5}
            axes.broken_barh([(bar.start, bar.end - bar.start)], (y, height), **look)
            if bar.op in _LABELS and (bar.end - bar.start) * at.scale > 22:
                label = f"{_LABELS[bar.op]}{bar.segment}"
                axes.text((bar.start + bar.end) / 2, y + height / 2, label, ha="center", va="center", fontsize=6)
    arrows = [bar for bar in bars if bar.op == StepOp.PUT and bar.peer >= 0]
    for bar in arrows if len(arrows) <= _MAX_ARROWS else ():
        lane = bar.lane if (bar.peer, bar.lane) in at.tops else 0
        ends = [at.tops[key] + _LANE_PX / 2 for key in ((bar.peer, lane), (bar.rank, bar.lane))]
        style = {"arrowstyle": "->", "lw": 0.6, "color": "#333", "alpha": 0.6 if len(arrows) < 120 else 0.3}
        axes.annotate("", (bar.end + LATENCY, ends[0]), (bar.end, ends[1]), arrowprops=style)
    axes.set_yticks([(lo + hi) / 2 for _, lo, hi in at.bands], [f"rank {rank}" for rank, _, _ in at.bands])
    axes.set_ylim(at.height - 34, _TOP - 8)
    axes.set_xlim(0, at.total * 1.01)
    axes.set_xlabel("time, in unit costs of a full segment")
    axes.set_title(_short(title(plans[0])), fontsize=9)
    figure.savefig(path)


def table(plan: Plan, *, limit: int = 200) -> Table:
    """One rank's rows for people.

    Args:
        plan: whose.
        limit: rows shown at most.
    """
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape as escape_markup
    from rich.table import Table

    heading = f"rank {plan.rank}: {title(plan)}"
    result = Table(
        title=escape_markup(heading),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("row", "lane", "op", "peer", "ch", "value", "seg", "elements"):
        result.add_column(name, justify="left" if name == "op" else "right", no_wrap=True)
    result.add_column("from", overflow="fold")
    result.add_column("to", overflow="fold")
    for row, step in enumerate(plan.steps[:limit]):
        op = StepOp(int(step["op"]))
        peer, channel = int(step["peer"]), int(step["channel"])
        n_src, n_dst = (int(step[f"n_{side}_wire"]) + int(step[f"n_{side}_array"]) for side in ("src", "dst"))
        lane = "pre" if row < plan.n_pre else "" if op == StepOp.ENTER else str(step["lane"])
        talks = op in (StepOp.PUT, StepOp.GET, StepOp.SIGNAL, StepOp.WAIT)
        result.add_row(
            str(row),
            lane,
            op.name,
            ("all" if peer == EVERYONE else str(peer)) if talks else "",
            str(channel) if talks and channel >= 0 else "",
            str(step["value"]) if op == StepOp.WAIT else "",
            str(step["segment"]),
            str(step["count"]) if n_src else "",
            _spans(plan, int(step["src"]), n_src),
            _spans(plan, int(step["dst"]), n_dst),
        )
    if len(plan.steps) > limit:
        result.caption = f"… and {len(plan.steps) - limit} rows more"
    return result


def _spans(plan: Plan, first: int, n: int) -> str:
    shown = []
    for rank, buffer, offset, count in plan.spans[first : first + n].tolist():
        name = Buffer(buffer).name if buffer < N_BUFFERS else f"ARRAY{buffer - N_BUFFERS + 1}"
        owner = "" if rank == plan.rank else f"{rank}:"
        shown.append(f"{owner}{name}\\[{offset}:{offset + count}]")
    return " ".join(shown)
