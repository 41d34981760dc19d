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
from gfkernels.plan.draw import draw, svg
from gfkernels.plan.text import chart, table
from gfkernels.plan.timeline import span, timeline
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
    assert picture.exists()
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
    ],
)
def test_command_refuses(arguments: tuple[str, ...], word: str) -> None:
    code, text = _run(*arguments)
    assert code == 2
    assert word in text.replace("\n", " ")
