"""All collectives between real ranks, over every way that bytes can take, against exact sums of fresh random input."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
from launch import run

WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "staged": {"transport": "shm"},
    "cma": {"transport": "cma"},
    "tcp": {"transport": "tcp"},
    "ring": {"plan": "ring"},
    "tcp-ring": {"transport": "tcp", "plan": "ring"},
}
REDUCING = "allreduce,sizes,special_values,wire"
OTHERS = "others,many,persistent,async,split,arrays,life"


def _run(size: int, cases: str, options: dict[str, Any]) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run(size, "collective_cases.py", cases, str(seed), options=options)


@pytest.mark.parametrize("size", [1, 2])
def test_quickly(size: int) -> None:
    _run(size, "sizes,others,async,arrays,life", {})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cases", [REDUCING, OTHERS], ids=["reducing", "others"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_every_way(way: str, size: int, cases: str) -> None:
    _run(size, cases, WAYS[way])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("size", "way"), [(1, "auto"), (4, "auto"), (5, "tcp"), (7, "auto")])
def test_other_numbers_of_ranks(size: int, way: str) -> None:
    _run(size, f"sizes,{OTHERS}", WAYS[way])


@pytest.mark.slow
def test_recursive_doubling() -> None:
    _run(3, "allreduce,special_values,wire", {"plan": "recursive_doubling"})


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_torch_tensors(way: str) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: its tensors are not tested")
    _run(2, "torch", WAYS[way])
