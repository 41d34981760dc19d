"""Owns what tests of faults share: the nursery that forks their ranks, the worlds of a test, a printed seed."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fault_world import Nursery, World

Start = Callable[..., World]


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """One for each worker of pytest: importing and loading costs seconds, forking does not."""
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def chance() -> random.Random:
    """Random moments; GFTEST_SEED repeats a run's."""
    seed = int(os.environ.get("GFTEST_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"GFTEST_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def start(nursery: Nursery) -> Iterator[Start]:
    """Starts worlds; whatever is left of them at the end of the test is killed, and leftovers are failures."""
    worlds: list[World] = []
    shm = set(os.listdir("/dev/shm"))

    def begin(case: str, *arguments: Any, size: int = 3, **options: Any) -> World:
        worlds.append(World(nursery, size, case, arguments, options))
        return worlds[-1]

    try:
        yield begin
    finally:
        stragglers = [pid for world in worlds for pid in world.kill()]
    assert not stragglers, f"processes {stragglers} outlived their world"
    new = {name for name in set(os.listdir("/dev/shm")) - shm if "gf" in name.lower()}
    assert not new, f"left behind in /dev/shm: {new}"
