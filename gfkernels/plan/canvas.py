"""Owns shapes on a drawing and how they become SVG text or a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from gfkernels.errors import UnavailableError

FONT_PX: Final = 11.0
_DPI: Final = 200
_PX_PER_INCH: Final = 100


@dataclass(frozen=True)
class Box:
    """A filled rectangle; an `edge` of "" has none. `tip` shows where the mouse rests."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Line:
    """A straight line; `dashed` for waiting, `arrow` for a message."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    width: float = 1.0
    dashed: bool = False
    arrow: bool = False
    tip: str = ""


@dataclass(frozen=True)
class Text:
    """One line of text with its baseline at `y`; `anchor` is "start", "middle" or "end"."""

    x: float
    y: float
    text: str
    size: float = FONT_PX
    anchor: str = "start"
    colour: str = "#111111"
    bold: bool = False


Shape = Box | Line | Text


def to_svg(shapes: Sequence[Shape], width: float, height: float) -> str:
    """The drawing as SVG text; later shapes lie above earlier ones."""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="{FONT_PX:g}">',
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0,0 L6,3 L0,6 z" fill="#444444"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    for shape in shapes:
        if isinstance(shape, Box):
            edge = f' stroke="{shape.edge}" stroke-width="0.6"' if shape.edge else ""
            out.append(
                f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" '
                f'fill="{shape.fill}"{edge}>{_tip(shape.tip)}</rect>'
            )
        elif isinstance(shape, Line):
            look = ' stroke-dasharray="2 3"' if shape.dashed else ""
            look += ' marker-end="url(#tip)"' if shape.arrow else ""
            out.append(
                f'<line x1="{shape.x1:.1f}" y1="{shape.y1:.1f}" x2="{shape.x2:.1f}" y2="{shape.y2:.1f}" '
                f'stroke="{shape.colour}" stroke-width="{shape.width:g}"{look}>{_tip(shape.tip)}</line>'
            )
        else:
            look = f' font-size="{shape.size:g}"' if shape.size != FONT_PX else ""
            look += f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
            look += ' font-weight="bold"' if shape.bold else ""
            out.append(
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" fill="{shape.colour}"{look}>{escape(shape.text)}</text>'
            )
    out.append("</svg>")
    return "\n".join(out) + "\n"


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def to_png(shapes: Sequence[Shape], width: float, height: float, path: Path) -> None:
    """The drawing as a PNG file.

    Raises:
        UnavailableError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise UnavailableError(
            "drawing a PNG needs matplotlib, which is not installed", "Install gfkernels[plot], or draw to a .svg file"
        ) from None
    figure: Any = Figure(figsize=(width / _PX_PER_INCH, height / _PX_PER_INCH), dpi=_DPI)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    points = 72 / _PX_PER_INCH
    for order, shape in enumerate(shapes):
        if isinstance(shape, Box):
            look: dict[str, Any] = {"facecolor": shape.fill, "edgecolor": shape.edge or "none", "zorder": order}
            axes.add_patch(Rectangle((shape.x, shape.y), shape.width, shape.height, linewidth=0.6 * points, **look))
        elif isinstance(shape, Line) and shape.arrow:
            style = {"arrowstyle": "-|>,head_length=0.25,head_width=0.12", "lw": shape.width * points}
            style |= {"color": shape.colour, "shrinkA": 0, "shrinkB": 0}
            ends = ((shape.x2, shape.y2), (shape.x1, shape.y1))
            axes.annotate("", *ends, arrowprops=style, zorder=order)
        elif isinstance(shape, Line):
            dashes = (0, (2, 3)) if shape.dashed else "-"
            look = {"color": shape.colour, "lw": shape.width * points, "linestyle": dashes, "zorder": order}
            axes.plot([shape.x1, shape.x2], [shape.y1, shape.y2], **look)
        else:
            align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            look = {"fontsize": shape.size * points, "color": shape.colour, "ha": align, "va": "baseline"}
            axes.text(
                shape.x, shape.y, _plain(shape.text), weight="bold" if shape.bold else "normal", zorder=order, **look
            )
    figure.savefig(path)


def _plain(text: str) -> str:
    # A dollar sign would begin mathematics.
    return text.replace("$", r"\$")
