"""Owns the tests of the program as a whole: help, version, and errors that are messages."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gfkernels.cli
from gfkernels import __version__
from gfkernels.cli import app

COMMANDS = ("run", "bench", "demo", "doctor", "plan")


def test_the_help_names_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert [name for name in COMMANDS if name not in shown.output] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert "Usage:" in shown.output


def test_the_version() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"gfkernels {__version__}\n")


def test_without_a_command_there_is_help() -> None:
    shown = CliRunner().invoke(app, [])
    assert "Usage:" in shown.output


@pytest.mark.parametrize("words", [["bnech"], ["bench", "--siez", "8"], ["bench", "-n", "none"], ["demo", "-n", "0"]])
def test_bad_usage_ends_with_2(words: list[str]) -> None:
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 2
    assert "Traceback" not in shown.output


def test_as_a_module(gfkernels: Callable[..., Any]) -> None:
    done = gfkernels("--version")
    assert (done.code, done.out, done.err) == (0, f"gfkernels {__version__}\n", "")


@pytest.mark.slow
def test_an_error_is_a_message(gfkernels: Callable[..., Any]) -> None:
    done = gfkernels("bench", "--dtype", "float23")
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("gfkernels bench: --dtype float23: expected one of float64, float32")
    assert "Traceback" not in done.err


def test_commands_import_what_they_need_only_when_they_run() -> None:
    """`--help` must not pay for what only a measurement needs."""
    heavy = {"matplotlib", "torch", "mpi4py", "numpy", "rich.progress"}
    for name in ("__init__", "bench", "demo", "doctor"):
        path = Path(gfkernels.cli.__file__).with_name(f"{name}.py")
        tree = ast.parse(path.read_text())
        imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        assert imported & heavy == set(), path
