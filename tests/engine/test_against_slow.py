"""The compiled engine, rank by rank and slice by slice, against the slow executor: equal bytes for every plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from engine_compare import ON_SHM, PLAIN, WHOLE, compare, kind_of, numbers_of
from engine_world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_families import FAMILIES

Array = npt.NDArray[Any]


@pytest.mark.parametrize("name", ON_SHM)
@pytest.mark.slow
def test_every_family(name: str) -> None:
    for size in (1, 2, 3, 5):
        plans = FAMILIES[name](size, 23, 7)
        for choice in (0, 1):
            compare(World(size, kind=kind_of(name)), [plans] * 3, numbers_of(name, choice), seed=size)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(ON_SHM),
    size=st.integers(1, 5),
    count=st.integers(0, 61),
    segment=st.integers(4, 40),
    choice=st.integers(0, 1),
    seed=st.integers(0, 2**32),
)
def test_any_parameters_and_order(name: str, size: int, count: int, segment: int, choice: int, seed: int) -> None:
    plans = FAMILIES[name](size, count, segment)
    compare(World(size, kind=kind_of(name)), [plans] * 3, numbers_of(name, choice), seed)


@settings(max_examples=25, deadline=None)
@given(
    names=st.lists(st.sampled_from([n for n in ON_SHM if "enter0" not in n and "packed1" not in n and "many" not in n]),
                   min_size=2, max_size=6),
    size=st.integers(2, 4),
    count=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_different_plans_follow_one_another(names: list[str], size: int, count: int, seed: int) -> None:
    """One world, whose counters, STAGE and INLINE carry over from plan to plan."""
    calls = [FAMILIES[name](size, count, 9) for name in names]
    compare(World(size), calls, PLAIN, seed)


@pytest.mark.slow
def test_bases_over_thousands_of_calls() -> None:
    """Arrivals are never reset: after thousands of calls of all plans the counters still tell calls apart."""
    lot = np.random.default_rng(5)
    size = 3
    names = [n for n in ON_SHM if "enter0" not in n and "packed1" not in n and "many" not in n]
    variants = [FAMILIES[name](size, count, 5) for name in names for count in (1, 7, 16)]
    world = World(size)
    calls = [variants[int(i)] for i in lot.integers(0, len(variants), 2000)]
    compare(world, calls, WHOLE, seed=1, threads=True)
    arrived = [sum(int(plans[r].expects.sum()) for plans in calls) for r in range(size)]
    assert [int(world.bases[r].sum()) for r in range(size)] == arrived
    assert min(arrived) > 2000


@pytest.mark.parametrize("name", ["ring-allreduce-packed0-out1-landing0-enter0", "doubling-packed1-out0-enter0",
                                  "direct-staged-allreduce-packed1-out0", "direct-registered-allreduce-packed0-out0",
                                  "direct-inline-allreduce-packed0-out0", "many-registered-packed0"])  # fmt: skip
@pytest.mark.slow
def test_ranks_in_threads(name: str) -> None:
    plans = FAMILIES[name](3, 101, 16)
    compare(World(3, kind=kind_of(name)), [plans] * 60, numbers_of(name), seed=3, threads=True)
