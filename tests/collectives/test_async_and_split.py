"""Owns asynchronous calls, split communicators, threads, and init and shutdown, between real ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import rank_async
from rank_calls import same_on_all_ranks
from ways import Way, ways

from gfkernels.testing import RankPool, run_ranks


@pytest.fixture(
    scope="module",
    params=ways("auto-1", "small-3", "cma-2", "ring-3", "tcp-3", "tcp-ring-2", "tcp-5",
                quick=("auto-2", "tcp-2")),
)  # fmt: skip
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture
def pool(way: Way, ranks: Callable[..., RankPool]) -> RankPool:
    return ranks(way.size, **way.options)


@pytest.mark.slow
def test_several_in_flight(pool: RankPool, seed: int) -> None:
    for _ in range(3):
        same_on_all_ranks(pool.run(rank_async.in_flight, seed))


def test_program_order(pool: RankPool) -> None:
    pool.run(rank_async.in_order, 20)


def test_dropped_works(pool: RankPool, seed: int) -> None:
    same_on_all_ranks(pool.run(rank_async.dropped, seed))


@pytest.mark.slow
def test_waits_that_run_out(pool: RankPool, way: Way) -> None:
    if way.size > 1:
        pool.run(rank_async.waits_run_out)


def test_progress_without_waiting(pool: RankPool) -> None:
    pool.run(rank_async.done_by_itself)


def test_split(pool: RankPool, way: Way) -> None:
    if way.name in ("ring", "tcp-ring"):
        pool.run(rank_async.two_communicators_at_once, 5)
    for rank, groups in enumerate(pool.run(rank_async.split)):
        parity, size = rank % 2, way.size
        assert groups[0] == list(range(parity, size, 2)) and groups[1] == groups[0][::-1]
        assert groups[2] == list(range(size))[::-1] and groups[3] == [rank]


def test_two_communicators_in_two_threads(pool: RankPool) -> None:
    pool.run(rank_async.two_communicators_at_once, 40)


def test_two_threads_on_one_communicator(pool: RankPool, way: Way) -> None:
    if way.size > 1:
        pool.run(rank_async.two_threads_on_one)


def test_from_init_to_shutdown(pool: RankPool) -> None:
    pool.run(rank_async.life)


@pytest.mark.parametrize("options", [{"transport": "shm"}, {"plan": "ring"}, {"plan": "recursive_doubling"}])
def test_ranks_with_memory_of_their_own_sizes(options: dict[str, str]) -> None:
    run_ranks(3, rank_async.sizes_of_memory_differ, options=options)
