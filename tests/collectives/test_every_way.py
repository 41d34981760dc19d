"""Owns allreduce over every way that bytes can take: every op, dtype, memory and awkward size, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import exact_sums as truth
import pytest
import rank_calls
from rank_calls import Case, Done
from ways import Way, ways

from gfkernels.testing import RankPool

MIB = 1 << 20


@pytest.fixture(
    scope="module",
    params=ways(
        "auto-1", "tcp-2", "small-2", "shm-2", "cma-2", "ring-2", "doubling-2", "tcp-ring-2", "tcp-doubling-2",
        "auto-3", "small-3", "cma-3", "ring-3", "doubling-3", "tcp-3",
        "small-4", "doubling-4", "tcp-ring-4", "cma-5", "tcp-5", "doubling-5", "small-7", "tcp-doubling-7",
        quick=("auto-2",),
    ),
)  # fmt: skip
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture
def pool(way: Way, ranks: Callable[..., RankPool]) -> RankPool:
    return ranks(way.size, **way.options)


def _run(pool: RankPool, *arguments: Any, function: Callable[..., Any] = rank_calls.run_cases) -> list[Any]:
    answers = pool.run(function, *arguments)
    rank_calls.same_on_all_ranks(answers)
    return list(answers[0])


def _dtypes(way: Way) -> tuple[str, ...]:
    """Every rank loads every kernel that it uses, 20 ms each: many ranks use some of them, few ranks all."""
    return truth.DTYPES if way.size < 5 else ("float32", "bfloat16", "int16", "bool")


def _plans(done: list[Done]) -> set[str]:
    return {one.plan for one in done}


EXPECTED = {
    "auto": {"direct.registered", "direct.staged", "direct.inline"},
    "small": {"direct.registered", "direct.staged", "direct.inline"},
    "shm": {"direct.registered", "direct.staged", "direct.inline"},
    "cma": {"direct.cma", "direct.inline"},
    "ring": {"ring"},
    "doubling": {"recursive_doubling"},
    "tcp-ring": {"ring"},
    "tcp-doubling": {"recursive_doubling"},
}


def test_every_op_and_dtype(pool: RankPool, way: Way, seed: int) -> None:
    done: list[Done] = []
    for turn, counts in enumerate(([0, 1, way.size + 1], [97, 2503])):
        done += _run(pool, seed, rank_calls.every_op_and_dtype(counts, turn, None, _dtypes(way)))
    if way.size > 1 and way.name in EXPECTED and way.name not in ("auto", "shm"):
        assert _plans(done) == EXPECTED[way.name], "other plans ran than this test is about"


def test_awkward_sizes(pool: RankPool, way: Way, seed: int) -> None:
    told = _run(pool, seed, "float32", [40_009, 70_001], function=rank_calls.run_sizes)
    assert any(done.plan in EXPECTED.get(way.name, {done.plan}) for _, _, done in told) or way.size == 1
    if way.is_direct:
        for count in {count for count, _, _ in told}:
            assert len({done.digest for c, _, done in told if c == count}) == 1, "memory changed the bits"


def test_wires(pool: RankPool, way: Way, seed: int) -> None:
    for turn, wire in enumerate(truth.WIRES):
        _run(pool, seed, rank_calls.every_op_and_dtype([1, 97, 2503], turn, wire, _dtypes(way)))


def test_wild_values(pool: RankPool, way: Way, seed: int) -> None:
    cases = [
        Case(op, dtype, 1999, rank_calls.MEMORIES[turn % 3], wire, offset=turn % 2, wild=True)
        for dtype in sorted({*truth.FLOATS} & {*_dtypes(way)})
        for turn, wire in enumerate((None, *truth.WIRES))
        for op in truth.OPS
    ]
    _run(pool, seed, cases)


def test_the_same_bits_in_every_run(pool: RankPool, seed: int) -> None:
    cases = [
        Case("sum", dtype, count, memory, wire)
        for dtype in ("float32", "bfloat16")
        for count in (13, 5003)
        for memory in rank_calls.MEMORIES
        for wire in (None, "float16")
    ]
    first = _run(pool, seed, cases, 3)
    assert first == _run(pool, seed, cases[::-1], 1)[::-1]


@pytest.mark.slow
def test_several_mib(pool: RankPool, way: Way, seed: int) -> None:
    # What recursive doubling sends, it keeps in staging memory: (2 + log2) times the array.
    nbytes = 2 * MIB if "doubling" in way.name else 5 * MIB
    cases = [
        Case("sum", "float32", nbytes // 4 + 1, "registered"),
        Case("sum", "float32", nbytes // 4 - 1, "ordinary", offset=1),
        Case("mean", "float16", nbytes // 2 + 3, "ordinary", out=True),
        Case("max", "int64", nbytes // 8 + 1, "mixed", offset=1),
        Case("sum", "float64", nbytes // 8 - 3, "ordinary", "bfloat16"),
    ]
    if way.name == "auto" and way.size == 2:
        cases.append(Case("sum", "float32", 32 * MIB // 4 + 1, "ordinary"))
    done = _run(pool, seed, cases)
    if way.name in ("auto", "cma") and way.size > 1:
        # What is ordinary and large goes by cross-memory attach; asked for by name, it also carries the registered.
        if way.name == "auto" and way.size == 2:
            assert {one.path for one in done[1:-1]} == {"staged"} and done.pop().path == "cma"
        else:
            assert {one.path for one in done[1:]} == {"cma"}
        assert done[0].path == ("registered" if way.name == "auto" else "cma")
