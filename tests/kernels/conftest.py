"""Owns what the kernel tests share: their helper modules can be imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

# pytest's importlib mode puts no test folder on the path.
for folder in (Path(__file__).parent, Path(__file__).parent.parent):
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def first_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A cache folder, and what the process said that filled it by running every kernel."""
    from kernel_process import digests

    cache = tmp_path_factory.mktemp("kernels")
    return cache, digests(cache)
