"""Owns the tests of the benchmark's options: what is refused before a process starts, and that ranks get the rest."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gfkernels.cli import app
from gfkernels.cli.bench_options import Options
from gfkernels.errors import ConfigError, UnavailableError, UsageError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["alltoall"], "collective alltoall: expected one of allreduce, reduce_scatter"),
        (["--op", "avg"], "--op avg: expected one of sum, mean, prod, min, max"),
        (["--dtype", "complex64"], "--dtype complex64: expected one of"),
        (["--wire", "int8"], "--wire int8: expected one of float16, bfloat16"),
        (["--wire", "float16", "--dtype", "int32"], "cannot carry int32"),
        (["broadcast", "--wire", "float16"], "a broadcast sends the arrays as they are"),
        (["--op", "mean", "--dtype", "int32"], 'op="mean" of int32 arrays'),
        (["--memory", "shared"], "--memory shared: expected one of registered, ordinary, both"),
        (["-b", "8x"], "-b 8x: expected a number of bytes"),
        (["-b", "1M", "-e", "1K"], "is above -e"),
        (["-f", "1"], "-f 1: sizes grow"),
        (["-f", "nan"], "-f nan: sizes grow"),
        (["-f", "inf"], "-f inf: sizes grow"),
        (["barrier", "--persistent"], "--persistent is for allreduce"),
        (["allgather", "--out-of-place"], "--out-of-place is for allreduce"),
        (["--persistent", "--out-of-place"], "work in place"),
        (["--transport", "ib"], "transport='ib': expected auto | shm | cma | tcp"),
        (["--plan", "tree"], "plan='tree': expected auto | direct | ring"),
        (["--segment-bytes", "3"], "segment_bytes='3': expected bytes"),
        (["--lanes", "99"], "lanes='99': expected an integer"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--json", "."], "that is a folder"),
        (["--plot", "picture.gif"], "ends in .svg or .png"),
        (["barrier", "--plot", "picture.svg"], "a barrier has none"),
    ],
)
def test_what_is_refused(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gfkernels.cli.self_run.run_ranks", lambda *_, **__: pytest.fail("a process was started"))
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GFKERNELS_TRANSPROT", "tcp")
    with pytest.raises(ConfigError, match="GFKERNELS_TRANSPORT"):
        Options().validate()


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "matplotlib" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(UnavailableError, match=r"gfkernels\[plot\]") as caught:
        Options(plot_file=str(tmp_path / "x.svg")).validate()
    assert caught.value.remedy


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # the tests may run as root, whom nothing stops
    with pytest.raises(UsageError, match="no permission"):
        Options(json_file=str(tmp_path / "x.json")).validate()


def test_ranks_get_what_was_asked_for() -> None:
    options = Options(op="max", dtype="int8", settings={"plan": "ring"}, peers={"gloo": "", "mpi": "not there"})
    assert Options.loads(options.dumps()) == options


def test_sizes_that_come_to_the_same_count_once() -> None:
    options = Options("allgather", first="1", last="16", factor=2, dtype="float64")
    assert [case.count for case in options.cases(4, 0)] == [4]
    assert [case.count for case in Options("barrier").cases(4, 0)] == [0]


def test_about() -> None:
    assert Options().about() == "allreduce sum float32 in place"
    assert Options("allgather", wire="float16").about() == "allgather float32 travelling as float16"
    assert Options(persistent=True).about().endswith("persistent handle")
