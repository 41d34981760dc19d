"""Owns what the arena's tests share: their helper module can be imported, and arenas are closed after a test."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# pytest's importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from gfkernels.transport.arena import Arena


@pytest.fixture
def make_arena() -> Iterator[Callable[..., Arena]]:
    """Makes arenas, and checks that each could be closed at the end, with no array over it left."""
    made: list[Arena] = []

    def make(size: int | None = 64 << 20) -> Arena:
        made.append(Arena(size))
        return made[-1]

    yield make
    gc.collect()
    for arena in made:
        arena.close()
        assert arena.closed, "arrays still hold blocks of the arena"
