"""Owns random programs of allreduces between real ranks: whatever hypothesis asks for, all ranks are right."""

from __future__ import annotations

from collections.abc import Callable

import exact_sums as truth
import pytest
import rank_calls
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_calls import Case
from ways import SETTINGS

from gfkernels.testing import RankPool

_SIZES = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.sampled_from([2047, 2048, 2049, 8191, 8193, 65537]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any allreduce that is allowed."""
    dtype = draw(st.sampled_from(truth.DTYPES))
    wire = draw(st.sampled_from([None, *truth.WIRES])) if dtype in truth.FLOATS else None
    op = draw(st.sampled_from(truth.ops_of(dtype)))
    return Case(
        op,
        dtype,
        draw(_SIZES),
        draw(st.sampled_from(rank_calls.MEMORIES)),
        wire,
        draw(st.booleans()),
        draw(st.integers(0, 5)),
        # Products of any bits underflow on the way in some orders; only `direct` plans have one order.
        draw(st.booleans()),
        draw(st.integers(0, 1 << 20)),
    )


def _check(give: Callable[..., RankPool], name: str, size: int, program: list[Case]) -> None:
    rank_calls.same_on_all_ranks(give(size, **SETTINGS[name]).run(rank_calls.run_cases, 0, program))


_QUIETLY = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@given(program=st.lists(cases(), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None, suppress_health_check=_QUIETLY)
@pytest.mark.slow
def test_random_programs_of_two_ranks(ranks: Callable[..., RankPool], program: list[Case]) -> None:
    _check(ranks, "auto", 2, program)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["small", "tcp-ring"])
@given(program=st.lists(cases(), min_size=1, max_size=4))
@settings(max_examples=17, deadline=None, suppress_health_check=_QUIETLY)
def test_random_programs(ranks: Callable[..., RankPool], name: str, size: int, program: list[Case]) -> None:
    _check(ranks, name, size, program)
