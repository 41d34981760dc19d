"""Owns the tests of jax arrays, which never change: a call gives a new one."""

from __future__ import annotations

from typing import Any

import pytest

from gfkernels.arrays import empty_like, inspect, overlap_check
from gfkernels.errors import UsageError

jax: Any = pytest.importorskip("jax", reason="jax is not installed: nothing about its arrays is tested")


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int8", "uint32", "bool"])
def test_the_result_is_a_new_array(name: str) -> None:
    x = jax.numpy.arange(6).reshape(2, 3).astype(name)
    before = x.copy()
    seen = inspect(x)
    assert seen.immutable and seen.framework == "jax" and seen.dtype.name == name and seen.shape == (2, 3)
    assert seen.staging.tobytes() == jax.device_get(x).tobytes()
    seen.staging[...] = 1
    seen.finish()
    result = seen.result()
    assert isinstance(result, jax.Array) and result.dtype == x.dtype
    assert bool((result == jax.numpy.ones_like(x)).all()) and bool((x == before).all())
    seen.staging[...] = 0
    assert bool((result == jax.numpy.ones_like(x)).all()), "the result shares the temporary"


def test_inputs_are_read_where_they_are_and_outputs_made_anew() -> None:
    x = jax.numpy.ones((2, 3))
    seen = inspect(x, writable=False)
    assert seen.staging is None and seen.address
    with pytest.raises(UsageError, match="out is an immutable jax array; leave out= away"):
        overlap_check(seen, inspect(x, role="out"))
    made = empty_like(seen, (4,))
    made.staging[...] = 2
    assert isinstance(made.result(), jax.Array) and made.result().tolist() == [2, 2, 2, 2]


def test_traced_values_are_refused() -> None:
    with pytest.raises(UsageError, match=r"traced by jax.*outside jax\.jit"):
        jax.jit(inspect)(jax.numpy.ones(3))
