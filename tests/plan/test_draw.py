"""Pictures, tables and the command."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from plan_families import FAMILIES
from rich.console import Console
from typer.testing import CliRunner

from gfkernels.cli.plan import plan_command
from gfkernels.errors import UnavailableError, UsageError
from gfkernels.plan.canvas import Box, Text
from gfkernels.plan.choose import choose
from gfkernels.plan.draw import draw, picture, svg
from gfkernels.plan.text import chart, table
from gfkernels.plan.timeline import Numbering, span, timeline
from gfkernels.types import StepOp

app = typer.Typer()
app.command()(plan_command)


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.mark.parametrize("name", FAMILIES)
def test_every_plan_can_be_drawn_and_printed(name: str) -> None:
    plans = FAMILIES[name](3, 40, 16)
    bars = timeline(plans)
    assert len(bars) == sum(len(plan.steps) for plan in plans)
    assert span(bars) > 0
    root = ElementTree.fromstring(svg(plans))
    ranks = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text") if (e.text or "").startswith("rank ")]
    assert ranks == ["rank 0", "rank 1", "rank 2"]
    console = Console(width=160, record=True, quiet=True)
    console.print(table(plans[0], limit=5))


def test_a_message_arrives_after_it_was_sent() -> None:
    bars = timeline(FAMILIES["ring-allreduce-packed0-out0-landing0-enter0"](3, 60, 12))
    by_row = {(bar.rank, bar.row): bar for bar in bars}
    for rank in range(3):
        rows = [bar for (owner, _), bar in by_row.items() if owner == rank]
        for lane in {bar.lane for bar in rows}:
            times = [bar for bar in rows if bar.lane == lane]
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(times))
    assert any(bar.op == StepOp.WAIT and bar.end > bar.start for bar in bars)


def test_messages_and_labels_follow_a_chunk_round_the_ring() -> None:
    plans = FAMILIES["ring-allreduce-packed0-out0-landing0-enter0"](4, 16, 16)
    bars = timeline(plans)
    assert Numbering.of(plans).word == "chunk"
    for rank in range(4):
        sent = [bar.part for bar in bars if bar.rank == rank and bar.op == StepOp.PUT]
        assert sent == [(rank - 1 - message) % 4 for message in range(6)]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("ring-allreduce-packed1-out0-landing0-enter1", "segment"),
        ("direct-staged-allgather-packed0", "segment"),
        ("direct-cma-allgather-packed0", "block"),
        ("doubling-packed0-out0-enter0", "round"),
        ("direct-registered-allreduce-packed0-out0", "chunk"),
        ("many-registered-packed0", "array"),
    ],
)
def test_what_numbers_count(name: str, word: str) -> None:
    assert Numbering.of(FAMILIES[name](4, 40, 16)).word == word


def test_chart_fits_its_width_and_says_where_it_is_cut() -> None:
    short, long = (FAMILIES["ring-allreduce-packed0-out0-landing0-enter0"](3, count, 12) for count in (12, 600))
    for plans, cut in ((short, False), (long, True)):
        for width in (60, 200):
            lines = chart(plans, width).plain.split("\n")
            lanes = [line for line in lines if line.startswith("rank")]
            assert len(lanes) == 3 * plans[0].n_lanes
            assert max(map(len, lanes)) <= width
            assert ("cut off" in lines[-1]) == cut
    assert chart(long, 100, ascii_only=True).plain.isascii()
    assert "and 4 lanes more" in chart(long, 100, most_lines=2).plain


def test_a_long_plan_is_drawn_from_its_beginning() -> None:
    plans = FAMILIES["ring-allreduce-packed0-out0-landing0-enter0"](2, 4000, 8)
    bars = timeline(plans, until=50)
    assert 0 < len(bars) < sum(len(plan.steps) for plan in plans) / 4
    assert bars == [bar for bar in timeline(plans) if (bar.rank, bar.row) in {(b.rank, b.row) for b in bars}]
    assert "the plan goes on" in svg(plans)


def test_nothing_on_a_picture_overlaps() -> None:
    for count in (1000, 10**6):
        for size in (4, 8):
            choice = choose("allreduce", size=size, count=count, itemsize=4, plan="ring")
            shapes, width, height = picture([choice.build(rank) for rank in range(size)])
            boxes = [s for s in shapes if isinstance(s, Box) and s.edge]
            rows: dict[float, list[Box]] = {}
            for box in boxes:
                rows.setdefault(box.y, []).append(box)
            for row in rows.values():
                row.sort(key=lambda box: box.x)
                assert all(a.x + a.width <= b.x + 0.01 for a, b in pairwise(row))
            for text in (s for s in shapes if isinstance(s, Text)):
                assert 0 <= text.x <= width and 0 < text.y < height
            legend = sorted((s.x, len(s.text)) for s in shapes if isinstance(s, Text) and s.y == 47 and len(s.text) > 1)
            assert all(x + 6.6 * n < after for (x, n), (after, _) in pairwise(legend))


def test_formats(tmp_path: Path) -> None:
    plans = FAMILIES["ring-broadcast-landing0-enter0"](3, 40, 8)
    draw(plans, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    with pytest.raises(UsageError, match=r"plan\.pdf"):
        draw(plans, tmp_path / "plan.pdf")
    if importlib.util.find_spec("matplotlib"):
        draw(plans, str(tmp_path / "plan.png"))
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    else:
        with pytest.raises(UnavailableError, match="matplotlib"):
            draw(plans, tmp_path / "plan.png")


def test_command(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    code, text = _run("ring", "-n", "4", "--count", "1000", "--check", "--network", "--draw", str(picture))
    assert code == 0, text
    assert "checked: 4 ranks" in text and "COMBINE" in text and "1:STAGE[" in text
    assert "rank 3  →2" in text and "number: chunk" in text and "--segment-bytes 256" in text
    assert picture.exists()
    code, text = _run("ring", "-n", "4", "--count", "1000", "--segment-bytes", "256", "--rows", "0")
    assert code == 0 and "number: segment" in text and "rank 3.1" in text and "shows a pipeline" not in text
    code, text = _run("auto", "-n", "2", "--count", "8", "--rows", "0")
    assert code == 0 and "direct.inline" in text
    code, text = _run("ring", "-n", "600", "--count", "1000000", "--rows", "1")
    assert code == 0 and "too many for a chart" in text
    code, text = _run("direct", "-n", "2", "--variant", "staged", "--wire", "float16", "--rank", "1", "--check")
    assert code == 0 and "direct.staged" in text
    code, text = _run(
        "auto", "--op", "mean", "--dtype", "float16", "--network", "--rows", "0", "--collective", "barrier"
    )
    assert code == 0 and "dissemination" in text


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("tree",), "tree"),
        (("ring", "--dtype", "float8"), "float8"),
        (("ring", "--op", "median"), "median"),
        (("ring", "--collective", "alltoall"), "alltoall"),
        (("ring", "--rank", "9"), "rank 9"),
        (("direct", "--network"), "one host"),
        (("direct", "--variant", "magic"), "magic"),
        (("ring", "--collective", "broadcast", "--root", "4"), "root 4"),
        (("ring", "--collective", "reduce_scatter", "--count", "10"), "not divisible"),
        (("ring", "--draw", "plan.gif"), "plan.gif"),
        (("ring", "--draw", "no/such/folder/plan.svg"), "no/such/folder"),
        (("ring", "--wire", "int8"), "wire 'int8'"),
        (("ring", "--wire", "float16", "--dtype", "int32"), "only floating-point"),
        (("ring", "--op", "mean", "--dtype", "int32"), "integers have no mean"),
        (("ring", "--dtype", "bool"), "min or max"),
        (("ring", "--count", "-3"), "greater than or equal to 0"),
        (("ring", "--count", str(10**20)), "rows"),
        (("direct", "--count", str(10**20)), str(2**59)),
        (("ring", "-n", "64", "--count", str(10**8), "--check"), "too many to check"),
        (("recursive_doubling", "--count", str(10**8)), "staging_bytes"),
    ],
)
def test_command_refuses(arguments: tuple[str, ...], word: str) -> None:
    code, text = _run(*arguments)
    assert code == 2
    assert word in text.replace("\n", " ")
