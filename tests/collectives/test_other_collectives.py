"""Owns reduce_scatter, allgather, broadcast, barrier, allreduce_many and persistent handles over every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import rank_others
from rank_calls import same_on_all_ranks
from ways import Way, ways

import gfkernels as gf
from gfkernels.testing import RankPool, RanksFailed


@pytest.fixture(
    scope="module",
    params=ways(
        "auto-1", "tcp-2", "small-2", "cma-2", "ring-2", "tcp-ring-2", "small-3", "cma-3", "ring-3", "tcp-3",
        "tcp-ring-4", "auto-5",
        quick=("auto-2",),
    ),
)  # fmt: skip
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture
def pool(way: Way, ranks: Callable[..., RankPool]) -> RankPool:
    return ranks(way.size, **way.options)


def _run(pool: RankPool, function: Callable[..., Any], *arguments: Any) -> None:
    same_on_all_ranks(pool.run(function, *arguments))


def test_reduce_scatter(pool: RankPool, seed: int) -> None:
    _run(pool, rank_others.reduce_scatter, seed, [0, 1, 98, 3001])


def test_allgather(pool: RankPool, seed: int) -> None:
    _run(pool, rank_others.allgather, seed, [0, 1, 97, 3001])


def test_broadcast(pool: RankPool, seed: int) -> None:
    _run(pool, rank_others.broadcast, seed, [0, 1, 97, 9001])


@pytest.mark.slow
def test_large_blocks(pool: RankPool, seed: int) -> None:
    _run(pool, rank_others.broadcast, seed, [400_003])
    _run(pool, rank_others.allgather, seed, [100_003])


def test_copies_that_go_past_the_caches(ranks: Callable[..., RankPool], seed: int) -> None:
    # 8 MiB and more of one peer for elements of 4 and 8 bytes, in arrays that begin anywhere.
    pool = ranks(2)
    _run(pool, rank_others.broadcast, seed, [(2 << 20) + 3])
    _run(pool, rank_others.allgather, seed, [(2 << 20) + 3])


def test_barrier(pool: RankPool) -> None:
    assert min(pool.run(rank_others.barrier, 10)) >= 0


@pytest.mark.parametrize(("op", "wire"), [("sum", None), ("max", None), ("sum", "float16"), ("prod", "bfloat16")])
def test_lists(pool: RankPool, seed: int, op: str, wire: str | None) -> None:
    _run(pool, rank_others.many, seed, op, wire, rank_others.MIXED)


def test_lists_of_many_small_arrays(pool: RankPool, seed: int) -> None:
    shapes = [("float32", 17 + i % 5) for i in range(150)] + [("bfloat16", 3)] * 20
    _run(pool, rank_others.many, seed, "mean", None, shapes)
    _run(pool, rank_others.many, seed, "sum", None, [])
    _run(pool, rank_others.many, seed, "sum", None, [("float32", 0)] * 3)


def test_handles(pool: RankPool, seed: int) -> None:
    _run(pool, rank_others.handles, seed)


def test_calls_made_again(pool: RankPool, seed: int) -> None:
    _run(pool, rank_others.again, seed)


def _lists_differ(what: str) -> list[dict[str, Any]]:
    comm = gf.init()
    shapes, dtypes = [5, 3000, 7], ["float32", "float32", "int32"]
    if comm.rank == 1:
        if what == "size":
            shapes[1] += 1
        elif what == "swapped":
            shapes = [5, 7, 3000]
        elif what == "dtype":
            dtypes[2] = "float32"
        else:
            shapes, dtypes = shapes[:2], dtypes[:2]
    xs = [np.ones(n, dtype) for n, dtype in zip(shapes, dtypes, strict=True)]
    try:
        comm.allreduce_many(xs)
    except gf.MismatchError as error:
        assert "allreduce" in str(error)
        if comm.transport == "shm":
            assert all((x == 1).all() for x in xs), "an array was written before the lists were compared"
        try:
            comm.barrier()
        except gf.CommunicatorBroken:
            return error.table
        raise AssertionError("a broken communicator took a call") from None
    finally:
        gf.shutdown()
    raise AssertionError("lists that differ were reduced")


@pytest.mark.parametrize("what", ["size", "swapped", "dtype", "shorter"])
def test_lists_that_differ_are_a_mismatch(pool: RankPool, way: Way, what: str) -> None:
    if way.size == 1:
        return
    for table in pool.run(_lists_differ, what):
        assert [row["rank"] for row in table] == list(range(way.size))


def _no_barrier() -> None:
    comm = gf.init()
    comm.barrier = lambda: None  # type: ignore[method-assign]
    rank_others.barrier(4)


def test_the_barrier_test_notices_its_absence(pool: RankPool, way: Way) -> None:
    if way.size == 1:
        return
    with pytest.raises(RanksFailed, match="left before"):
        pool.run(_no_barrier)
