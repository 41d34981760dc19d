"""Owns narrow wires: one result by every path of `direct`, the default by configuration, means that do not overflow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import rank_wires
from rank_calls import same_on_all_ranks
from ways import SETTINGS

from gfkernels.testing import RankPool

Give = Callable[..., RankPool]


def _bits(give: Give, size: int, name: str, memory: str, seed: int) -> list[str]:
    answers = give(size, **SETTINGS[name]).run(rank_wires.every_case, seed, memory)
    same_on_all_ranks(answers)
    return list(answers[0])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_all_paths_give_the_same_bits(ranks: Give, seed: int, size: int) -> None:
    """Registered, staged, mixed, in small pieces and in large ones, by cross-memory attach, inline."""
    want = _bits(ranks, size, "auto", "registered", seed)
    for name, memory in (("auto", "ordinary"), ("small", "registered"), ("small", "mixed"), ("cma", "ordinary")):
        assert _bits(ranks, size, name, memory, seed) == want, f"{name}, {memory}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [("auto", 2), ("small", 3), ("tcp", 2), ("tcp-ring", 3)],
)
def test_a_default_wire_is_for_floats(ranks: Give, seed: int, name: str, size: int) -> None:
    pool = ranks(size, wire="float16", **SETTINGS[name])
    same_on_all_ranks(pool.run(rank_wires.by_configuration, seed))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("auto", 2),
        *(
            pytest.param(name, size, marks=pytest.mark.slow)
            for name, size in (("small", 2), ("small", 3), ("ring", 3), ("tcp-ring", 3), ("doubling", 5))
        ),
    ],
)
@pytest.mark.slow
def test_means_do_not_overflow(ranks: Give, name: str, size: int) -> None:
    same_on_all_ranks(ranks(size, **SETTINGS[name]).run(rank_wires.means_without_overflow))
