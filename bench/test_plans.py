"""pytest-benchmark cases: how long a plan takes to build, to prove and to choose."""

from __future__ import annotations

from typing import Any

import pytest

from gfkernels.plan import direct, doubling, many, ring
from gfkernels.plan.check import check
from gfkernels.plan.choose import choose
from gfkernels.plan.rules import check_rows


@pytest.mark.parametrize("variant", direct.VARIANTS)
def test_direct(benchmark: Any, variant: str) -> None:
    """N = 2, 64 KiB of fp32: at most 0.3 ms."""
    benchmark(direct.allreduce, 1, 2, 16384, variant=variant, segment_elements=16384)


@pytest.mark.parametrize("size", [4, 8])
def test_ring(benchmark: Any, size: int) -> None:
    """64 MiB of fp32 in 64 KiB segments: well under 50 ms."""
    plan = benchmark(ring.allreduce, 1, size, 16 << 20, segment_elements=16384)
    assert len(plan.steps) > 6000


@pytest.mark.parametrize("variant", ["registered", "cma", "staged", "network"])
def test_chosen(benchmark: Any, variant: str) -> None:
    """What a communicator of 8 ranks builds for its first 64 MiB of fp32: well under 50 ms."""
    kind: dict[str, Any] = {"same_host": False} if variant == "network" else {"variant": variant}
    choice = choose("allreduce", size=8, count=16 << 20, itemsize=4, **kind)
    benchmark(choice.builder, 1, 8, choice.count, **dict(choice.arguments))


def test_rows_of_a_long_plan(benchmark: Any) -> None:
    """Bounds and signals of two ranks' plans for 8 GiB, some 90 000 rows each."""
    choice = choose("allreduce", size=2, count=2**31 + 11, itemsize=4, same_host=False)
    benchmark.pedantic(check_rows, ([choice.build(rank) for rank in range(2)],), rounds=2)


def test_ring_packed(benchmark: Any) -> None:
    """The same with a 16-bit wire."""
    benchmark(ring.allreduce, 1, 4, 16 << 20, packed=True, segment_elements=32768)


def test_doubling(benchmark: Any) -> None:
    """N = 16, 4 KiB."""
    benchmark(doubling.allreduce, 5, 16, 1024)


def test_many(benchmark: Any) -> None:
    """200 arrays."""
    benchmark(many.allreduce_many, 0, 4, [1000 + 7 * i for i in range(200)], inline_nbytes=8192)


def test_choice_seen_before(benchmark: Any) -> None:
    """What a repeated call pays."""

    def chosen() -> None:
        choose("allreduce", size=2, count=1000, itemsize=4).build(0)

    benchmark(chosen)


def test_proof(benchmark: Any) -> None:
    """Checking a ring of 8 ranks and 40 segments over three calls."""
    plans = [ring.allreduce(r, 8, 40 * 8 * 16, segment_elements=16) for r in range(8)]
    benchmark.pedantic(check, (plans,), rounds=2)
