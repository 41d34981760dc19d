"""The compiled engine runs every kind of plan to the exact result, whoever runs when, and leaves nothing half done."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_rig import Rig

from gfkernels.communicator.programs import Programs
from gfkernels.communicator.requests import Request
from gfkernels.engine.context import N_VARIANT_WORDS, Ctx, Kind, Prog, Variant
from gfkernels.plan.execute import Machine
from gfkernels.types import DTYPES, ReduceOp

POISON = 0x5A


def chooser(seed: int) -> Callable[[list[int]], int]:
    """Picks ranks at random, now and then the same one many times over."""
    rng = random.Random(seed)
    return lambda waiting: waiting[rng.randrange(len(waiting))]


def inputs(rng: np.random.Generator, size: int, count: int, dtype: str = "float32") -> list[npt.NDArray[Any]]:
    """Small whole numbers: every order of adding them is exact."""
    return [rng.integers(-9, 9, count).astype(DTYPES[dtype].numpy) for _ in range(size)]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_allreduce_under_any_order_of_turns(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    count = data.draw(st.sampled_from([0, 1, 2, 3, 63, 64, 65, 257, 1000]))
    registered = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    plan = data.draw(st.sampled_from(["auto", "ring", "recursive_doubling"]))
    wire = data.draw(st.sampled_from([None, "float16", "bfloat16"]))
    use_out = data.draw(st.booleans())
    rig = Rig(size, cma=data.draw(st.booleans()), plan=plan, inline_bytes=data.draw(st.sampled_from([0, 256])))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    turn = chooser(data.draw(st.integers(0, 1 << 30)))
    for _ in range(3):
        values = inputs(rng, size, count)
        xs = [rig.ranks[r].array(values[r], registered[r]) for r in range(size)]
        outs = [np.full(count, np.nan, np.float32) for _ in range(size)] if use_out else None
        more = {"wire": None if wire is None else DTYPES[wire], "out": use_out}
        rig.run(rig.request("allreduce", "float32", count, **more), xs, outs, turn=turn)
        expected = np.sum(values, axis=0, dtype=np.float32) if count else np.zeros(0, np.float32)
        for r in range(size):
            assert np.array_equal((outs or xs)[r], expected), (plan, wire, count, r)
            if use_out:
                assert np.array_equal(xs[r], values[r])


@pytest.mark.parametrize("plan", ["auto", "ring"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("count", [0, 1, 7, 500])
def test_other_collectives(plan: str, size: int, count: int) -> None:
    rng = np.random.default_rng(size * 1000 + count)
    rig = Rig(size, plan=plan)
    turn = chooser(count + size)
    values = inputs(rng, size, size * count)
    outs = [np.full(count, np.nan, np.float32) for _ in range(size)]
    rig.run(rig.request("reduce_scatter", "float32", size * count), values, outs, turn=turn)
    total = np.sum(values, axis=0)
    for r in range(size):
        assert np.array_equal(outs[r], total[r * count : (r + 1) * count])
    values = inputs(rng, size, count, "int16")
    gathered = [np.full(size * count, POISON, np.int16) for _ in range(size)]
    rig.run(rig.request("allgather", "int16", count), values, gathered, turn=turn)
    for r in range(size):
        assert np.array_equal(gathered[r], np.concatenate(values))
    for root in range(size):
        xs = inputs(rng, size, count, "float64")
        sent = xs[root].copy()
        rig.run(rig.request("broadcast", "float64", count, root=root), xs, turn=turn)
        assert all(np.array_equal(x, sent) for x in xs)


def test_thousands_of_calls_of_different_plans_keep_their_counts() -> None:
    rig, rng, turn = Rig(3, inline_bytes=64), np.random.default_rng(5), chooser(6)
    names = ("allreduce", "reduce_scatter", "allgather")
    for number in range(2000):
        count = int(rng.integers(0, 40)) * 3
        name = names[number % 3]
        values = inputs(rng, 3, count)
        length = {"allreduce": 0, "reduce_scatter": count // 3, "allgather": 3 * count}[name]
        outs = [np.full(length, np.nan, np.float32) for _ in range(3)] if length or name != "allreduce" else None
        kept = [value.copy() for value in values]
        rig.run(rig.request(name, "float32", count), values, outs, turn=turn)
        total = np.sum(kept, axis=0)
        if name == "allreduce":
            assert all(np.array_equal(x, total) for x in values), number
        elif name == "allgather":
            assert outs is not None and all(np.array_equal(out, np.concatenate(kept)) for out in outs), number
    assert [int(rank.words[Ctx.SEQUENCE]) for rank in rig.ranks] == [2000] * 3
    assert [int(rank.words[Ctx.N_CALLS]) for rank in rig.ranks] == [2000] * 3


@pytest.mark.parametrize("op", list(ReduceOp))
def test_paths_give_equal_bits(op: ReduceOp) -> None:
    rng = np.random.default_rng(int(op))
    values = [rng.standard_normal(777).astype(np.float16) for _ in range(4)]
    results = []
    for kinds, cma, inline in ((True, True, 0), (False, True, 0), (False, False, 0), (False, True, 4096)):
        rig = Rig(4, cma=cma, inline_bytes=inline)
        xs = [rig.ranks[r].array(values[r], kinds) for r in range(4)]
        rig.run(rig.request("allreduce", "float16", 777, op=op), xs, turn=chooser(3))
        assert len({x.tobytes() for x in xs}) == 1
        results.append(xs[0].tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize("plan", ["auto", "ring", "recursive_doubling"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_slow_executor_gives_the_same_bits(plan: str, size: int, wire: str | None) -> None:
    rng = np.random.default_rng(size)
    for count in (1, 100, 1001):
        values = [rng.standard_normal(count).astype(np.float32) * 10.0 ** rng.integers(-3, 3) for _ in range(size)]
        wire_dtype = None if wire is None else DTYPES[wire]
        rig = Rig(size, cma=False, plan=plan)
        programs = rig.request("allreduce", "float32", count, op=ReduceOp.MEAN, wire=wire_dtype)
        xs = [value.copy() for value in values]
        rig.run(programs, xs, turn=chooser(count))
        plans = [program.plan(Kind.STAGED) for program in programs]
        machine = Machine(size, DTYPES["float32"], op=ReduceOp.MEAN, wire=wire_dtype, seed=count)
        slow = machine.run(plans, [[value] for value in values])
        assert all(x.tobytes() == out[0].tobytes() for x, out in zip(xs, slow, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_calls_take_turns_in_stage(size: int) -> None:
    """Call s is in window s % n of every rank's STAGE, as all ranks see it; what is in the others stays as it is."""
    rig, count = Rig(size, cma=False, inline_bytes=0), 1000
    programs = rig.request("allreduce", "float32", count)
    seen = set()
    for sequence in range(1, 40):
        before = [rank.stage.copy() for rank in rig.ranks]
        values = inputs(np.random.default_rng(sequence), size, count)
        xs = [value.copy() for value in values]
        rig.run(programs, xs)
        assert all(np.array_equal(x, np.sum(values, axis=0)) for x in xs)
        at = sequence % 15 * 4096
        for rank, stage in zip(rig.ranks, before, strict=True):
            changed = np.flatnonzero(rank.stage != stage)
            assert len(changed) and at <= changed[0] and changed[-1] < at + 4 * count
        seen.add(at)
    assert len(seen) == 15


def test_without_enter_calls_stay_in_one_place() -> None:
    rig = Rig(2, plan="ring")
    near = rig.programs[0].terrain
    request = Request("allreduce", ReduceOp.SUM, DTYPES["float32"], elements=1000)
    windows = []
    for terrain in (near, replace(near, same_host=False)):
        words = Programs(terrain).get(request).words[int(Prog.VARIANTS) :].reshape(3, N_VARIANT_WORDS)
        windows.append(words[Kind.STAGED if terrain is not near else Kind.REGISTERED, Variant.N_WINDOWS])
    assert windows[0] > 1 and windows[1] <= 1


@pytest.mark.parametrize("cma", [False, True])
def test_all_ranks_stream_where_one_should(cma: bool) -> None:
    rig = Rig(3, cma=cma, inline_bytes=0)
    # -1: one row was slow, which may have been an interruption.
    for slow, rows in ((0, 0), (1, 1000), (2, 1000), (1, -1), (0, 0)):
        rig.ranks[slow].words[Ctx.STREAMED_ROWS] = rows
        # Rows through the caches are timed unless they are small, and on a busy machine they may really be slow.
        count = 3000 if rows > 0 else 300
        programs = rig.request("allreduce", "float32", count)
        values = inputs(np.random.default_rng(7), 3, count)
        xs = [value.copy() for value in values]
        rig.run(programs, xs)
        assert all(np.array_equal(x, np.sum(values, axis=0)) for x in xs)
        for rank in rig.ranks:
            assert rank.words[Ctx.STREAMS] == (rows > 0)
            assert rank.words[Ctx.KIND] == (Kind.CMA if cma else Kind.STAGED)
            # A rank that follows another counts nothing: it must not go on by itself.
            assert rows > 0 if rank.words[Ctx.STREAMED_ROWS] > 0 else rank.words[Ctx.STREAMED_ROWS] >= -1
            rank.words[Ctx.STREAMED_ROWS] = 0


def test_a_rank_that_fills_no_stage_stops_asking_the_others_to_stream() -> None:
    rig = Rig(3, cma=False, inline_bytes=0)
    programs = rig.request("broadcast", "float32", 3000, root=0)
    rig.ranks[1].words[Ctx.STREAMED_ROWS] = 5
    streamed = []
    for _ in range(8):
        rig.run(programs, [np.ones(3000, np.float32) for _ in range(3)])
        streamed.append(int(rig.ranks[0].words[Ctx.STREAMS]))
    assert streamed == [1] * 5 + [0] * 3
