"""Owns collectives between two network namespaces over TCP, the interface's own counters showing what passed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import netns
import pytest
import rank_network
from rank_calls import same_on_all_ranks

from gfkernels.testing import RankPool

_OK, _REASON = netns.available()
pytestmark = [pytest.mark.skipif(not _OK, reason=_REASON), pytest.mark.net, pytest.mark.slow]

PORT = 29_400
COUNT, TURNS = 1_000_003, 3


@contextmanager
def _ranks(wire: netns.Wire, sides: list[int]) -> Iterator[RankPool]:
    """Ranks in these namespaces, joined."""
    with RankPool(len(sides), prefix=lambda rank: wire.command(sides[rank], []), timeout=100) as pool:
        store = f"{wire.addresses[sides[0]]}:{PORT}"
        joined = pool.run(rank_network.join, len(sides), store, netns.INTERFACE)
        assert joined == [("tcp", len(sides))] * len(sides)
        yield pool


def _passed(wire: netns.Wire, pool: RankPool, seed: int, narrow: str | None) -> list[int]:
    """Bytes that the wire carried, in each direction, for the allreduces of a run."""
    before = [wire.sent_nbytes(side) for side in (0, 1)]
    same_on_all_ranks(pool.run(rank_network.reduce, seed, COUNT, TURNS, narrow))
    return [wire.sent_nbytes(side) - start for side, start in zip((0, 1), before, strict=True)]


@pytest.mark.parametrize("sides", [[0, 1], [0, 0, 1, 1]], ids=["2 ranks", "4 ranks"])
def test_the_ring_crosses_the_wire(seed: int, sides: list[int]) -> None:
    size = len(sides)
    # Of every array a rank sends 2 (N - 1) / N to its right; one right neighbour is in the other namespace.
    payload = 2 * (size - 1) * 4 * COUNT * TURNS // size
    with netns.wire() as wire, _ranks(wire, sides) as pool:
        for passed in _passed(wire, pool, seed, None):
            assert payload <= passed < 1.1 * payload + 300_000, f"{passed} bytes passed, the ring sends {payload}"
        for passed in _passed(wire, pool, seed, "float16"):
            assert payload // 2 <= passed < 0.55 * payload + 300_000, f"{passed} bytes passed, half of {payload} should"
        same_on_all_ranks(pool.run(rank_network.others, seed))


def test_a_slow_wire(seed: int) -> None:
    """Full sockets and partial sends: 100 Mbit/s carry less than the ranks could send."""
    with netns.wire(rate="100mbit") as wire, _ranks(wire, [0, 1]) as pool:
        passed = _passed(wire, pool, seed, "bfloat16")
        assert min(passed) >= 2 * COUNT * TURNS
        same_on_all_ranks(pool.run(rank_network.others, seed))
