"""Every wait, signal, order and atomic that the product relies on is needed: less one of them, a check fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutant_checks import CHECKS
from mutant_table import MUTANTS, Mutant

import gfkernels

pytestmark = pytest.mark.mutants
_PACKAGE = Path(gfkernels.__file__).resolve().parent
_CHECKS = Path(__file__).with_name("mutant_checks.py")
_DOCUMENT = Path(__file__).parents[2] / "docs" / "mutants.md"


@pytest.mark.parametrize("check", sorted(CHECKS))
def test_the_product_holds(check: str) -> None:
    CHECKS[check]()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / "gfkernels"
    shutil.copytree(_PACKAGE, copy, symlinks=False, ignore=shutil.ignore_patterns("__pycache__"))
    target = copy / mutant.path
    source = target.read_text()
    assert source.count(mutant.old) == 1, (
        f"{mutant.path} has changed: {mutant.old!r} occurs {source.count(mutant.old)}x"
    )
    target.write_text(source.replace(mutant.old, mutant.new))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "GFKERNELS_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(_CHECKS), mutant.check]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 3, f"{mutant.name} survives {mutant.check}: {done.returncode}\n{done.stdout}{done.stderr}"


def test_the_document_lists_them_all() -> None:
    text = _DOCUMENT.read_text()
    assert len(MUTANTS) >= 8
    for mutant in MUTANTS:
        assert f"| `{mutant.name}` | {mutant.breaks} | `{mutant.check}` |" in text, mutant.name
