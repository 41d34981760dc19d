"""Owns the tests of the benchmark's own checking: right results pass, and each kind of wrong one does not."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from gfkernels.cli.bench_case import Case, Data, digest, neutral, parse_nbytes, poison, sweep
from gfkernels.errors import UsageError
from gfkernels.types import DTYPES, ReduceOp

Array = npt.NDArray[Any]
COUNT = 70_000
"""More than one period of the contents, and not a multiple of it."""

_NUMPY: dict[str, Any] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def case(collective: str = "allreduce", op: str = "sum", dtype: str = "float32", **more: Any) -> Case:
    wire = more.pop("wire", None)
    in_place = more.pop("in_place", collective in ("allreduce", "broadcast"))
    made = Case(collective, op, DTYPES[dtype], DTYPES[wire] if wire else None, more.pop("n", 3), 1, in_place, **more)
    return made.sized(COUNT * made.dtype.itemsize)


def inputs(of: Case, seed: int) -> list[Array]:
    """What each rank gives."""
    given = []
    for rank in range(of.n):
        array = np.empty(of.source_count, of.dtype.numpy)
        Data(dataclasses.replace(of, rank=rank), seed).fill(array)
        given.append(array)
    return given


def reduced(of: Case, given: list[Array]) -> Array:
    """The reduction as the library defines it: operands rounded to the wire, added in fp32, rounded once."""
    kind = of.dtype.kind
    if kind != "f":
        return np.asarray(_NUMPY[of.op].reduce(given, dtype=of.dtype.numpy))
    accumulator: Any = np.float64 if of.dtype.itemsize == 8 else np.float32
    travelled = [array if of.wire is None else array.astype(of.wire.numpy) for array in given]
    total = travelled[0].astype(accumulator)
    for array in travelled[1:]:
        total = _NUMPY[of.op](total, array.astype(accumulator))
    if of.op == "mean":
        total = total / accumulator(of.n)
    if of.wire is not None:
        total = total.astype(of.wire.numpy)
    return total.astype(of.dtype.numpy)


def cases_that_reduce() -> list[tuple[str, str, str | None]]:
    found: list[tuple[str, str, str | None]] = []
    for op, dtype in itertools.product((op.label for op in ReduceOp), DTYPES.values()):
        if (dtype.kind == "b" and op not in ("min", "max")) or (op == "mean" and dtype.kind != "f"):
            continue
        found += [(op, dtype.name, wire) for wire in (None, "float16", "bfloat16") if wire is None or dtype.kind == "f"]
    return found


@pytest.mark.parametrize(("op", "dtype", "wire"), cases_that_reduce())
def test_correct_reductions_pass_and_one_wrong_element_is_found(op: str, dtype: str, wire: str | None) -> None:
    of = case(op=op, dtype=dtype, wire=wire)
    data = Data(of, 5)
    result = reduced(of, inputs(of, 5))
    assert data.wrong(result, result) == 0
    at = COUNT - 3
    result[at] = ~result[at] if of.dtype.kind in "biu" else result[at] * 2 + 1
    assert data.wrong(result, result) == 1


def test_a_reduction_that_left_out_a_rank_is_wrong_almost_everywhere() -> None:
    of = case()
    result = reduced(of, inputs(of, 1)[:-1])
    assert Data(of, 1).wrong(result, result) > 0.99 * COUNT


def test_rounding_on_the_wire_is_not_taken_for_exact() -> None:
    exact, rounded = case(), case(wire="float16")
    result = reduced(rounded, inputs(rounded, 1))
    assert Data(exact, 1).wrong(result, result) > 0.9 * COUNT


def test_poison_that_nobody_wrote_over_is_found() -> None:
    for dtype in ("float64", "float32", "float16", "bfloat16", "int8", "uint64"):
        of = case(dtype=dtype)
        result = np.empty(COUNT, of.dtype.numpy)
        poison(result)
        assert Data(of, 1).wrong(result, result) > 0.98 * COUNT, dtype


def test_a_reduce_scatter_block_is_compared_with_its_own_place() -> None:
    of = case("reduce_scatter", in_place=False)
    given = inputs(of, 3)
    whole = reduced(of, given)
    blocks = np.split(whole, of.n)
    assert Data(of, 3).wrong(blocks[of.rank], given[of.rank]) == 0
    assert Data(of, 3).wrong(blocks[0], given[of.rank]) > 0.9 * of.target_count


def test_an_allgather_has_every_block_in_its_place() -> None:
    of = case("allgather", in_place=False)
    given = inputs(of, 3)
    result = np.concatenate(given)
    assert Data(of, 3).wrong(result, given[of.rank]) == 0
    swapped = np.concatenate([given[1], given[0], given[2]])
    assert Data(of, 3).wrong(swapped, given[of.rank]) > 0.5 * of.count
    assert Data(dataclasses.replace(of, wire=DTYPES["bfloat16"]), 3).wrong(
        result.astype(ml_dtypes.bfloat16).astype(np.float32), given[of.rank]
    ) == 0  # fmt: skip


def test_a_broadcast_is_compared_with_the_root() -> None:
    of = case("broadcast", root=2)
    given = inputs(of, 3)
    assert Data(of, 3).wrong(given[2], given[2]) == 0
    assert Data(of, 3).wrong(given[1], given[1]) > 0.99 * COUNT


def test_an_input_that_was_written_into_is_found() -> None:
    of = case(in_place=False)
    given = inputs(of, 3)
    result = reduced(of, given)
    source = given[of.rank].copy()
    assert Data(of, 3).wrong(result, source) == 0
    source[17] += 1
    assert Data(of, 3).wrong(result, source) == 1


def test_contents_are_fresh_for_every_seed_and_rank() -> None:
    of = case()
    one, other = inputs(of, 1), inputs(of, 2)
    assert not (one[0] == other[0]).any()
    assert not (one[0] == one[1]).any()


def test_neutral_contents_stay_as_they_are() -> None:
    for op in ("sum", "prod", "min", "max", "mean"):
        for dtype in ("float32", "bfloat16", "int8"):
            array = np.empty(4, DTYPES[dtype].numpy)
            neutral(array, op)
            again = _NUMPY[op](array, array)
            assert (again == array).all() or op == "mean"


def test_digests_differ_where_bits_do() -> None:
    zero = np.zeros(10, ml_dtypes.bfloat16)
    assert digest(zero) == digest(zero.copy())
    assert digest(zero) != digest(-zero)


def test_sizes_are_whole_elements_and_divisible() -> None:
    assert case(n=3).sized(1).count == 1
    assert case(n=3).sized(10).count == 2
    divided = case("allgather", n=3, in_place=False).sized(10)
    assert (divided.count, divided.source_count, divided.nbytes) == (3, 1, 12)


@pytest.mark.parametrize(
    ("collective", "factor"), [("allreduce", 1.5), ("reduce_scatter", 0.75), ("allgather", 0.75), ("broadcast", 1.0)]
)
def test_bus_bandwidth_as_nccl_tests_has_it(collective: str, factor: float) -> None:
    assert case(collective, n=4).bus_factor == factor


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("64K", 65536), ("1MiB", 1 << 20), ("2g", 2 << 30), ("16KB", 16384), ("100B", 100)]
)
def test_sizes_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_nbytes(text, "-b") == nbytes


@pytest.mark.parametrize("text", ["", "K", "-8", "8.5", "0", "8X", "1e6", "٣"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="expected a number of bytes"):
        parse_nbytes(text, "-e")


def test_sweeps() -> None:
    assert sweep(8, 8, 4) == [8]
    assert sweep(8, 1024, 4) == [8, 32, 128, 512]
    assert sweep(1, 5, 1.01) == [1, 2, 3, 4, 5]
    with pytest.raises(UsageError, match="above 1"):
        sweep(8, 16, 1)
    with pytest.raises(UsageError, match="above -e"):
        sweep(16, 8, 2)
