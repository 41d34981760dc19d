"""Owns plans as text: the pipeline as a chart of characters, and one rank's rows as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.box import ASCII, SIMPLE_HEAD
from rich.markup import escape
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gfkernels.plan.draw import SIGNS, colour
from gfkernels.plan.model import EVERYONE, Plan
from gfkernels.plan.timeline import LATENCY, Bar, Numbering, span, timeline
from gfkernels.types import N_BUFFERS, Buffer, StepOp

_ASCII_SIGNS: Final = SIGNS | {StepOp.PUT: ">", StepOp.GET: "<"}
_LEAST_CELLS: Final = 2.0
"""Characters for the work on a full segment: less would hide which one it is."""
_CUT_CELLS: Final = 3.0
"""The same where the plan does not fit, and only its beginning is shown."""
_MOST_CELLS: Final = 10.0
_STRENGTH: Final = {StepOp.COMBINE: 1.0, StepOp.COPY: 0.55, StepOp.PUT: 0.78, StepOp.GET: 0.78}


def chart(plans: Sequence[Plan], width: int, *, ascii_only: bool = False, most_lines: int = 64) -> Text:
    """The pipeline: a line for each lane of each rank, time from left to right.

    Args:
        plans: one per rank.
        width: characters of a line.
        ascii_only: use no other characters.
        most_lines: lanes shown at most.
    """
    lanes = [(plan.rank, lane) for plan in plans for lane in range(max(1, plan.n_lanes))]
    several = any(lane for _, lane in lanes)
    names = [f"rank {rank}" + (f".{lane}" if several else "") for rank, lane in lanes]
    left = max(len(name) for name in names) + 2
    room = max(20, width - left)
    bars = timeline(plans, until=room / _LEAST_CELLS)
    cut = len(bars) < sum(len(plan.steps) for plan in plans) or span(bars) * _LEAST_CELLS > room
    scale = _CUT_CELLS if cut else min(room / span(bars), _MOST_CELLS)
    signs = _ASCII_SIGNS if ascii_only else SIGNS
    result = Text(no_wrap=True, overflow="crop")
    for name, key in list(zip(names, lanes, strict=True))[:most_lines]:
        result.append(name.ljust(left))
        result.append_text(_line([bar for bar in bars if (bar.rank, bar.lane) == key], scale, room, signs))
        result.append("\n")
    if len(lanes) > most_lines:
        result.append(f"and {len(lanes) - most_lines} lanes more\n")
    result.append_text(_explanation(plans, bars, signs))
    if cut:
        result.append("\ncut off at the right: the plan goes on, --draw FILE shows more", style="dim")
    return result


def _line(bars: Sequence[Bar], scale: float, room: int, signs: dict[StepOp, str]) -> Text:
    cells = [(" ", "")] * room
    for bar in bars:
        lo, hi = round(bar.start * scale), min(room, round(bar.end * scale))
        if bar.op == StepOp.WAIT:
            filling = "." * (hi - lo)
        elif bar.op == StepOp.ENTER:
            filling = "#" * max(1, hi - lo)
        elif bar.op in signs:
            label = f"{signs[bar.op]}{bar.part}"
            filling = (label if len(label) <= hi - lo else signs[bar.op]).ljust(hi - lo, "-")
        else:
            continue
        background = colour(bar.part, _STRENGTH[bar.op]) if bar.op in signs else ""
        for i, character in enumerate(filling[: room - lo]):
            cells[lo + i] = (character, background)
    line = Text()
    at = 0
    while at < room:
        end = at
        while end < room and cells[end][1] == cells[at][1]:
            end += 1
        style = Style(color="#000000", bgcolor=cells[at][1]) if cells[at][1] else Style()
        line.append("".join(character for character, _ in cells[at:end]), style)
        at = end
    line.rstrip()
    return line


def _explanation(plans: Sequence[Plan], bars: Sequence[Bar], signs: dict[StepOp, str]) -> Text:
    ops = {bar.op for bar in bars}
    words = {StepOp.COMBINE: "combine", StepOp.COPY: "copy", StepOp.PUT: "put", StepOp.GET: "get"}
    entries = [f"{sign} {words[op]}" for op, sign in signs.items() if op in ops]
    entries += ["# enter"] if StepOp.ENTER in ops else []
    entries += [". waiting"] if any(bar.op == StepOp.WAIT and bar.end > bar.start for bar in bars) else []
    if ops & signs.keys():
        entries.append(f"number: {Numbering.of(plans).word}")
    entries.append(f"time: a full segment's work takes 1, a message {LATENCY}")
    return Text(", ".join(entries), style="dim")


def table(plan: Plan, *, limit: int = 200, ascii_only: bool = False) -> Table:
    """One rank's rows for people.

    Args:
        plan: whose.
        limit: rows shown at most.
        ascii_only: use no other characters.
    """
    result = Table(
        title=f"rows of rank {plan.rank}",
        title_justify="left",
        caption_justify="left",
        box=ASCII if ascii_only else SIMPLE_HEAD,
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
            "" if op == StepOp.ENTER else str(step["segment"]),
            str(step["count"]) if n_src else "",
            _spans(plan, int(step["src"]), n_src),
            _spans(plan, int(step["dst"]), n_dst),
        )
    if len(plan.steps) > limit:
        result.caption = f"and {len(plan.steps) - limit} rows more (--rows)"
    return result


def _spans(plan: Plan, first: int, n: int) -> str:
    shown = []
    for rank, buffer, offset, count in plan.spans[first : first + n].tolist():
        name = Buffer(buffer).name if buffer < N_BUFFERS else f"ARRAY{buffer - N_BUFFERS + 1}"
        owner = "" if rank == plan.rank else f"{rank}:"
        shown.append(escape(f"{owner}{name}[{offset}:{offset + count}]"))
    return " ".join(shown)
