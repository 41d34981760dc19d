"""Every wait, signal, order and atomic that the product relies on is needed: less one of them, a check fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import interpreted
import mutant_checks
import pytest
from mutant_table import MUTANTS
from weak_mutants import MUTANTS as WEAK

from gfkernels import engine as compiled
from gfkernels.communicator import site

pytestmark = pytest.mark.mutants
_DOCUMENT = Path(__file__).parents[2] / "docs" / "mutants.md"
_SITE = "gfkernels.communicator.site"
_CHECKS = sorted({mutant.check for mutant in MUTANTS.values()})


def _unchanged(check: str, engine: Any) -> Any:
    return site if check == "graves_are_kept" else engine


@pytest.mark.parametrize("check", _CHECKS)
@pytest.mark.parametrize("engine", [compiled, interpreted.engine()], ids=["compiled", "interpreted"])
def test_the_product_holds(check: str, engine: Any) -> None:
    getattr(mutant_checks, check)(_unchanged(check, engine))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str) -> None:
    mutant = MUTANTS[name]
    change = [(mutant.old, mutant.new)]
    if mutant.module == _SITE:
        subject = interpreted.changed(_SITE, change)
    else:
        subject = interpreted.engine({mutant.module: change})
    with pytest.raises(AssertionError):
        getattr(mutant_checks, mutant.check)(subject)


def test_the_document_lists_them_all() -> None:
    text = _DOCUMENT.read_text()
    assert len(MUTANTS) + len(WEAK) >= 8
    for name, mutant in MUTANTS.items():
        assert f"| {name} | {mutant.breaks} |" in text, name
    for name, weak in WEAK.items():
        assert f"| {name} | {weak.breaks} |" in text, name
