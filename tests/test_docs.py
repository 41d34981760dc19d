"""Owns the tests of the documentation: generated pages are current, links lead somewhere, every error is explained."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gfkernels
from gfkernels.config import Config

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_generated_pages_are_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make-api-docs"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run `make docs`:\n{done.stdout}{done.stderr}"


def test_every_public_name_has_a_docstring() -> None:
    assert not [name for name in gfkernels.__all__ if name != "__version__" and not getattr(gfkernels, name).__doc__]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in _LINK.findall(_FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken


def test_every_error_is_explained() -> None:
    explained = _anchors(ROOT / "docs" / "troubleshooting.md")
    errors = [
        name
        for name in gfkernels.__all__
        if isinstance(getattr(gfkernels, name), type) and issubclass(getattr(gfkernels, name), Exception)
    ]
    assert {name.lower() for name in errors if name != "GfkernelsError"} <= explained


def test_settings_that_pages_mention_exist() -> None:
    known = {setting.variable for setting in Config.settings()}
    for page in PAGES:
        used = set(re.findall(r"\bGFKERNELS_[A-Z_]*[A-Z]", page.read_text())) - {"GFKERNELS_NAME"}
        assert used <= known, page


def test_targets_that_pages_mention_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        mentioned = re.findall(r"(?:^|`|^RUN )make ([a-z]+)\b", page.read_text(), re.MULTILINE)
        assert set(mentioned) <= targets, page


def test_the_readmes_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    done = subprocess.run([sys.executable, "-c", code[1]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
