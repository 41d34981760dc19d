"""Owns what the command line's tests share: the program, run as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gfkernels.cli.self_run import environment

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ended:
    """A program that has ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def gfkernels(tmp_path: Path) -> Callable[..., Ended]:
    """Runs `gfkernels WORDS…` in a folder of the test's own, with only the settings that the test gives."""

    def run(*words: str, **variables: str) -> Ended:
        environ = {name: value for name, value in environment(variables).items() if name not in _RANK_VARIABLES}
        done = subprocess.run(
            [sys.executable, "-m", "gfkernels", *words],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run
