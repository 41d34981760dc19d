"""Owns what the transport tests share: their helper modules can be imported, and leaks of descriptors fail a test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# pytest's importlib mode puts no test folder on the path; `meshes` and `netns` are modules, not fixtures, because
# parametrisation needs them before any fixture runs.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def no_leaked_sockets() -> Iterator[None]:
    """Every socket that a test opened is closed at its end."""
    before = _sockets()
    yield
    gc.collect()
    leaked = _sockets() - before
    assert not leaked, f"sockets left open: {sorted(leaked)}"


def _sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found
