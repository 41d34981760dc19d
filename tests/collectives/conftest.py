"""Owns what the tests of collectives share: pools of real ranks that stay, their helper modules, a printed seed."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gfkernels.testing import RankPool

_HERE = Path(__file__).resolve().parent
# pytest's importlib mode puts no test folder on the path; the fixtures of network namespaces are the transports'.
sys.path[:0] = [str(_HERE), str(_HERE.parent / "transport")]

_POOLS_KEPT = 3
_RANKS_KEPT = 10
"""A rank takes about 150 MB and no time while it waits; starting it takes a second or more."""

Ranks = Callable[..., RankPool]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file, or of one way through it, share their ranks: one worker runs them."""
    for item in items:
        if _HERE in item.path.parents and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Gives the pool of `n` ranks with these settings, started once for all tests of this worker."""
    pools: OrderedDict[Any, RankPool] = OrderedDict()

    def give(n: int, **options: Any) -> RankPool:
        key = (n, tuple(sorted(options.items())))
        if key not in pools:
            while pools and (len(pools) >= _POOLS_KEPT or sum(pool.n for pool in pools.values()) + n > _RANKS_KEPT):
                pools.popitem(last=False)[1].close()
            env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            # Wherever the code under test would wait for ever, its own time-out tells more than the pool's.
            pools[key] = RankPool(n, options={"timeout_s": 60, **options}, env=env, timeout=110)
        pools.move_to_end(key)
        return pools[key]

    yield give
    for pool in pools.values():
        pool.close()


@pytest.fixture
def seed() -> int:
    """Of the test's random inputs; shown where the test fails."""
    chosen = random.SystemRandom().randrange(1 << 30)
    print(f"seed {chosen}")
    return chosen
