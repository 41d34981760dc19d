"""Owns the tests of the benchmark with real ranks: table, JSON, picture, exit codes, and being a rank itself."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import gfkernels as gf
from gfkernels.cli import app
from gfkernels.cli.bench_measure import Bench, Effort
from gfkernels.cli.bench_options import Options
from gfkernels.cli.bench_rank import take_part
from gfkernels.cli.bench_report import Table, json_line, number, side_by_side
from gfkernels.cli.bench_subjects import Ours

Run = Callable[..., Any]
QUICK = ("--iters", "3", "--warmup", "1")


def rows(text: str) -> list[list[str]]:
    """The table's lines, as cells."""
    return [line.split() for line in text.splitlines() if re.match(r"\s*(\d+|-)\s+(\d+|-)\s+[\w-]", line)]


def test_the_table(gfkernels: Run) -> None:
    done = gfkernels("bench", "-n", "2", "-b", "8", "-e", "64K", "-f", "8192", *QUICK)
    assert done.code == 0, done.err
    head = next(line for line in done.out.splitlines() if "algbw" in line)
    assert head.split()[1:10] == ["size", "count", "type", "op", "by", "time", "loop", "algbw", "busbw"]
    assert "#wrong" in head
    found = rows(done.out)
    assert [(row[0], row[1], row[4]) for row in found] == [
        ("8", "2", "registered"), ("8", "2", "ordinary"), ("65536", "16384", "registered"),
        ("65536", "16384", "ordinary"),
    ]  # fmt: skip
    assert [row[9] for row in found] == ["0"] * 4
    # The hash of the plan that ran, the same for the same plan.
    assert all(re.fullmatch(r"[0-9a-f]{16}", row[-1]) for row in found)
    assert found[0][-2:] == found[1][-2:] and found[0][-2] == "direct.inline"
    assert found[2][-2] == "direct.registered"
    assert "2 ranks over shm" in done.out and "every element right" in done.out
    assert done.err == ""


@pytest.mark.slow
def test_json_lines_say_where_they_come_from(gfkernels: Run, tmp_path: Path) -> None:
    words = ("bench", "-n", "2", "-b", "1K", "-e", "1K", "--memory", "registered", "--plan", "ring")
    (tmp_path / "out.json").write_text('{"from": "an earlier run"}\n')
    assert gfkernels(*words, "--json", "out.json", *QUICK).code == 0
    earlier, first = (json.loads(line) for line in (tmp_path / "out.json").read_text().splitlines())
    assert earlier == {"from": "an earlier run"}
    assert first["plan"] == "ring" and re.fullmatch(r"[0-9a-f]{16}", first["plan_hash"])
    assert first["path"] == "registered" or first["path"] == "staged"
    assert first["config"] == {"plan": "ring"} and first["transport"] == "shm"
    assert first["ranks"] == 2 and first["size_bytes"] == 1024 and first["wrong"] == 0
    assert set(first["versions"]) == {"gfkernels", "python", "numba", "llvmlite", "numpy", "ml_dtypes"}
    assert first["machine"]["cores"] > 0 and first["machine"]["cpu"]
    assert first["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", first["commit"])
    times = first["time_us"]
    assert 0 < times["min"] <= times["median"] <= times["p95"]
    assert "secret" not in json.dumps(first)


def test_json_on_stdout_is_nothing_but_json(capsys: Any) -> None:
    assert take_part(Options(first="64", last="64", iters=2, json_file="-")) == 0
    shown = capsys.readouterr()
    assert [json.loads(line)["by"] for line in shown.out.splitlines()] == ["registered", "ordinary"]
    assert "1 rank over self" in shown.err and "every element right" in shown.err


_EVERYTHING = """
from gfkernels.cli.bench_options import Options
from gfkernels.cli.bench_rank import take_part

SIZES = dict(first="1000", last="200K", factor=200, iters=2, warmup=0)
for options in (
    Options("reduce_scatter", dtype="bfloat16", op="mean", **SIZES),
    Options("allgather", dtype="int8", **SIZES),
    Options("broadcast", dtype="bool", **SIZES),
    Options(out_of_place=True, dtype="float64", op="min", **SIZES),
    Options(persistent=True, dtype="uint16", op="prod", **SIZES),
    Options(wire="float16", settings={"transport": "tcp"}, **SIZES),
    Options("barrier", **SIZES),
):
    assert take_part(options) == 0, options
"""


@pytest.mark.slow
def test_what_can_be_measured(gfkernels: Run, tmp_path: Path) -> None:
    (tmp_path / "everything.py").write_text(_EVERYTHING)
    done = gfkernels("run", "-n", "3", "--no-tag-output", "everything.py")
    assert done.code == 0, done.out + done.err
    assert done.out.count("4 rows, every element right") == 6
    assert done.out.count("3 ranks over shm") == 6 and done.out.count("3 ranks over tcp") == 1
    found = rows(done.out)
    assert [row[4] for row in found] == ["registered", "ordinary"] * 12 + ["gfkernels"]
    assert found[-1][:4] == ["-"] * 4
    # A row whose plan is not known would not say what was measured.
    assert all(re.fullmatch(r"[0-9a-f]{16}", row[-1]) for row in found)


@pytest.mark.slow
def test_as_a_rank_of_a_job(gfkernels: Run) -> None:
    words = ("-m", "gfkernels", "bench", "-b", "64", "-e", "64", "--memory", "ordinary")
    done = gfkernels("run", "-n", "2", "--no-tag-output", *words, *QUICK)
    assert done.code == 0, done.err
    assert len(rows(done.out)) == 1


def test_a_rank_of_a_job_starts_no_other_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["bench", "-n", "5"])
    assert done.exit_code == 2
    assert "-n 5: this process is a rank of a job of 2" in done.output


@pytest.mark.slow
def test_a_plan_that_cannot_do_it_is_one_message(gfkernels: Run) -> None:
    done = gfkernels("bench", "-n", "2", "-b", "32M", "-e", "32M", "--plan", "recursive_doubling", *QUICK)
    assert done.code == 2
    assert done.err.count('Raise it or use plan="ring"') == 1
    assert "Traceback" not in done.err


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(gf.UsageError, match="Take a smaller -e"):
        take_part(Options(first="8000G", last="8000G"))


@pytest.mark.slow
def test_the_picture(tmp_path: Path, capsys: Any) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed (gfkernels[plot])")
    for name, start in (("p.svg", b"<?xml"), ("p.png", b"\x89PNG")):
        path = str(tmp_path / name)
        assert take_part(Options(first="64", last="4K", factor=8, iters=2, plot_file=path)) == 0
        assert Path(path).read_bytes().startswith(start)
    assert "registered" in (tmp_path / "p.svg").read_text()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_gloo_beside_ours(gfkernels: Run) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    done = gfkernels("bench", "-n", "2", "-b", "4K", "-e", "4K", "--peers", *QUICK)
    assert done.code == 0, done.err
    assert "gloo" in [row[4] for row in rows(done.out)]
    assert "side by side" in done.out


@pytest.fixture
def alone() -> Any:
    """A communicator of one rank."""
    with gf.init(rank=0, size=1) as comm:
        yield comm


def test_a_wrong_result_is_told_and_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    honest = Ours.open

    def lying(self: Ours, case: Any) -> Any:
        source, target, call = honest(self, case)

        def wrong() -> None:
            call()
            target[1] += 3

        return source, target, wrong

    monkeypatch.setattr(Ours, "open", lying)
    assert take_part(Options(first="64", last="64", iters=2, memory="ordinary")) == 1
    shown = capsys.readouterr().out
    assert "WRONG: 1 elements in 1 of 1 rows" in shown


def test_without_checking_no_row_claims_to_be_right(capsys: Any) -> None:
    assert take_part(Options(first="64", last="64", iters=2, check=False)) == 0
    shown = capsys.readouterr().out
    assert "results were not checked" in shown
    assert [row[9] for row in rows(shown)] == ["-", "-"]


def test_as_many_calls_as_asked_for(alone: Any) -> None:
    bench = Bench(alone, [Ours(alone, "ordinary", False)], Effort(iters=7))
    (row,) = bench.measure(Options().case(1, 0).sized(64))
    assert len(row.times_us) == 7
    assert row.loop_us is not None and row.loop_us > 0
    bench = Bench(alone, [Ours(alone, "ordinary", False)], Effort(loop=False))
    (row,) = bench.measure(Options().case(1, 0).sized(64))
    assert 10 <= len(row.times_us) <= 500
    assert row.loop_us is None


def test_lines_stay_in_their_columns(alone: Any) -> None:
    bench = Bench(alone, [Ours(alone, "ordinary", False)], Effort(iters=3))
    (row,) = bench.measure(Options().case(1, 0).sized(64))
    table = Table(["ordinary", "registered"], with_ratio=True)
    names, units = table.heading()
    line = table.line(row, row)
    assert names.index("time") + 4 == units.index("(us)") + 4 == line.index(number(row.median_us)) + len(
        number(row.median_us)
    )  # fmt: skip
    assert json.loads(json_line(row, alone, {"persistent": False}))["transport"] == "self"
    assert side_by_side([row, row]) == []
    assert np.isfinite(row.algbw) and row.busbw == 0


def test_ranks_with_other_bits_are_told(monkeypatch: pytest.MonkeyPatch, alone: Any) -> None:
    """Within what rounding allows, but not the same on all ranks: made by a peer whose digest is another."""
    reduce = type(alone).allreduce

    def with_peer(self: Any, x: Any, op: str = "sum", **more: Any) -> Any:
        if op == "max" and x.dtype == np.int64:
            x[1] += 1
        return reduce(self, x, op, **more)

    monkeypatch.setattr(type(alone), "allreduce", with_peer)
    bench = Bench(alone, [Ours(alone, "ordinary", False)], Effort(iters=3))
    (row,) = bench.measure(Options().case(1, 0).sized(64))
    assert row.wrong == 1


@pytest.mark.slow
def test_plans_that_do_only_allreduce(gfkernels: Run) -> None:
    done = gfkernels("bench", "-n", "2", "-b", "64", "-e", "64", "--plan", "recursive_doubling", *QUICK)
    assert done.code == 0, done.err
    assert {row[-2] for row in rows(done.out)} == {"recursive_doubling"}
