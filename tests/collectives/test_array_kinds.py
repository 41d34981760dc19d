"""Owns arrays of all kinds through the API, between real ranks: strided, refused, torch's, jax's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import rank_arrays
from rank_calls import same_on_all_ranks
from ways import Way, ways

from gfkernels.testing import RankPool


@pytest.fixture(
    scope="module", params=ways("auto-1", "small-3", "cma-2", "ring-2", "tcp-2", "tcp-3", quick=("auto-2",))
)
def pool(request: pytest.FixtureRequest, ranks: Callable[..., RankPool]) -> RankPool:
    way: Way = request.param
    return ranks(way.size, **way.options)


@pytest.mark.slow
def test_strided_arrays_are_reduced_and_written_back(pool: RankPool, seed: int) -> None:
    same_on_all_ranks(pool.run(rank_arrays.strided, seed))


def test_refusals_name_the_reason_and_harm_nothing(pool: RankPool) -> None:
    pool.run(rank_arrays.refused)


def test_odd_arrays_that_are_taken(pool: RankPool) -> None:
    pool.run(rank_arrays.accepted)


@pytest.mark.slow
def test_torch_tensors(pool: RankPool, seed: int) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: its tensors are not reduced between ranks")
    same_on_all_ranks(pool.run(rank_arrays.torch_tensors, seed))


@pytest.mark.slow
def test_jax_arrays(pool: RankPool) -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed: its immutable arrays are not reduced between ranks")
    pool.run(rank_arrays.jax_arrays)
