"""Owns what ranks do with the collectives beside allreduce: lists, handles, blocks, gathers, broadcasts, barriers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import exact_sums as truth
import numpy as np
from exact_sums import Array
from rank_calls import MEMORIES, Place, info, is_registered

import gfkernels as gf

Told = tuple[str, str]
"""What all ranks must agree on: the call and how it went, and a hash of the result where all get the same."""


def _check_sum(
    comm: gf.Communicator, op: str, got: Array, inputs: Sequence[Array], wire: str | None, what: str
) -> None:
    plan, _ = info(comm)
    wire = wire or (comm.config.wire if truth.name_of(got) in truth.FLOATS else None)
    if comm.size == 1:
        truth.check_bits(got, inputs[0], what)
    elif plan.startswith(("direct", "entry")):
        truth.check_bits(got, truth.documented(op, inputs, wire), what)
    else:
        truth.within_bound(op, got, inputs, wire, what)


def reduce_scatter(seed: int, counts: Sequence[int]) -> list[Told]:
    """Every op and dtype, blocks of these sizes, in two dimensions, into given and into new arrays."""
    comm, told = gf.init(), []
    turns = itertools.count()
    for dtype, count in itertools.product(truth.DTYPES, counts):
        for op in truth.ops_of(dtype):
            turn = next(turns)
            wire = (None, None, "float16", "bfloat16")[turn % 4] if dtype in truth.FLOATS else None
            memory, total = MEMORIES[turn % 3], comm.size * count
            inputs = [truth.values([seed, 1], dtype, total, q, op=op) for q in range(comm.size)]
            registered = is_registered(memory, comm.rank)
            x = Place(dtype, total, registered=registered, offset=turn % 2)
            x.array[...] = inputs[comm.rank]
            out = Place(dtype, count, registered=registered)
            what = f"rank {comm.rank}: reduce_scatter {op} {dtype} {count} {memory} wire={wire}"
            if turn % 3:
                got = comm.reduce_scatter(x.array, op, out=out.array, wire=wire)
                assert got is out.array
            elif count % 2 == 0 and count:
                got = comm.reduce_scatter(x.array.reshape(comm.size, 2, -1), op, wire=wire)
                assert got.shape == (1, 2, count // 2)
            else:
                got = comm.reduce_scatter(x.array, op, wire=wire)
                assert got.shape == (count,)
            block = slice(comm.rank * count, (comm.rank + 1) * count)
            _check_sum(comm, op, got.reshape(-1), [one[block] for one in inputs], wire, f"{what} [{info(comm)}]")
            truth.check_bits(x.array, inputs[comm.rank], f"{what}: x")
            x.check(what)
            out.check(what)
            told.append((f"reduce_scatter {op} {dtype} {count}", info(comm)[0]))
    return told


def allgather(seed: int, counts: Sequence[int]) -> list[Told]:
    """Every dtype; bits travel as they are, or rounded to the wire, the own block too."""
    comm, told = gf.init(), []
    turns = itertools.count()
    for dtype, count in itertools.product(truth.DTYPES, counts):
        for wire in (None, *truth.WIRES) if dtype in truth.FLOATS else (None,):
            turn = next(turns)
            memory = MEMORIES[turn % 3]
            wild = wire is None and comm.config.wire is None
            pieces = [truth.values([seed, 2], dtype, count, q, wild=wild) for q in range(comm.size)]
            registered = is_registered(memory, comm.rank)
            x = Place(dtype, count, registered=registered, offset=turn % 2)
            x.array[...] = pieces[comm.rank]
            out = Place(dtype, comm.size * count, registered=registered)
            target = out.array.reshape(comm.size, count) if turn % 2 else None
            got = comm.allgather(x.array, out=target, wire=wire)
            what = f"rank {comm.rank}: allgather {dtype} {count} {memory} wire={wire} [{info(comm)}]"
            assert got.shape == (comm.size, count) and (target is None or got is target), what
            chosen = wire or (comm.config.wire if dtype in truth.FLOATS else None)
            for q, piece in enumerate(pieces):
                want = piece if comm.size == 1 or chosen in (None, dtype) else truth.documented("sum", [piece], chosen)
                truth.check_bits(got[q], want, f"{what}: block {q}")
            truth.check_bits(x.array, pieces[comm.rank], f"{what}: x")
            x.check(what)
            out.check(what)
            told.append((f"allgather {dtype} {count} {wire}", truth.digest(got)))
    return told


def broadcast(seed: int, counts: Sequence[int]) -> list[Told]:
    """Every dtype from every root, any bits at all; the root's array may be read-only."""
    comm, told = gf.init(), []
    turns = itertools.count()
    for dtype, count, root in itertools.product(truth.DTYPES, counts, range(comm.size)):
        turn = next(turns)
        memory = MEMORIES[turn % 3]
        x = Place(dtype, count, registered=is_registered(memory, comm.rank), offset=turn % 2)
        want = truth.values([seed, 3], dtype, count, root, wild=True)
        if comm.rank == root:
            x.array[...] = want
            x.array.flags.writeable = bool(turn % 2)
        assert comm.broadcast(x.array, root) is x.array
        what = f"rank {comm.rank}: broadcast {dtype} {count} from {root} {memory} [{info(comm)}]"
        truth.check_bits(x.array, want, what)
        x.check(what)
        told.append((what.partition(": ")[2].partition(" [")[0], truth.digest(x.array)))
    return told


def barrier(turns: int) -> float:
    """Nobody leaves before the last one comes; gives the least distance seen, in seconds."""
    comm = gf.init()
    least = np.inf
    for turn in range(turns):
        late = turn % comm.size
        if comm.rank == late:
            time.sleep(0.03)
        came = time.monotonic()  # one clock for all processes of a machine
        comm.barrier()
        left = time.monotonic()
        arrivals = comm.allgather(np.array([came]))
        assert left >= arrivals.max(), f"rank {comm.rank} left before rank {int(arrivals.argmax())} came"
        least = min(least, left - float(arrivals.max()))
    for _ in range(200):
        comm.barrier()
    return float(least)


MIXED = [
    ("float32", 5), ("float16", 3001), ("int64", 0), ("bfloat16", 77), ("float32", 70_003), ("uint8", 1),
    ("float64", 1024), ("int8", 9001), ("float32", 1), ("float16", 0), ("uint16", 40_001),
]  # fmt: skip


def many(seed: int, op: str, wire: str | None, shapes: Sequence[tuple[str, int]]) -> list[Told]:
    """A list of arrays in every memory; small and large, empty, of mixed types."""
    comm, told = gf.init(), []
    for number, memory in enumerate((*MEMORIES, "alternating")):
        lists = [
            [truth.values([seed, 4, number, i], dtype, count, q, op=op) for i, (dtype, count) in enumerate(shapes)]
            for q in range(comm.size)
        ]
        places = []
        for i, (dtype, count) in enumerate(shapes):
            registered = i % 2 == 0 if memory == "alternating" else is_registered(memory, comm.rank)
            places.append(Place(dtype, count, registered=registered, offset=i % 2))
            places[-1].array[...] = lists[comm.rank][i]
        xs = [place.array for place in places]
        results = comm.allreduce_many(xs, op, wire=wire)
        assert all(result is x for result, x in zip(results, xs, strict=True))
        for i, x in enumerate(xs):
            what = f"rank {comm.rank}: xs[{i}] of {len(xs)}, {shapes[i]}, {memory} wire={wire} [{info(comm)}]"
            _check_sum(comm, op, x, [one[i] for one in lists], wire, what)
            places[i].check(what)
            told.append((f"{memory} {i}", truth.digest(x)))
    return told


def handles(seed: int) -> list[Told]:
    """Handles reduce what the array holds when they are called: whole, strided, several in turn, time and again."""
    comm, told = gf.init(), []
    plain, registered = np.empty(3001, np.float32), gf.empty(50_000, "float16")
    strided, large = np.zeros((40, 30), np.float64)[:, ::3], np.empty(200_003, np.float32)
    arrays = {"sum": plain, "mean": registered, "max": strided, "min": large}
    calls = {op: comm.plan_allreduce(x, op, wire="float16" if op == "min" else None) for op, x in arrays.items()}
    for turn in range(4):
        for op, x in arrays.items():
            shape, dtype = x.shape, truth.name_of(x)
            inputs = [truth.values([seed, 5, turn], dtype, x.size, q).reshape(shape) for q in range(comm.size)]
            x[...] = inputs[comm.rank]
            assert calls[op]() is x
            _check_sum(comm, op, x, inputs, "float16" if op == "min" else None, f"handle {op} turn {turn} {info(comm)}")
            told.append((f"{op} {turn}", truth.digest(x)))
            other = np.ones(3)
            assert comm.allreduce(other)[0] == comm.size  # other calls in between
    return told


def again(seed: int) -> list[Told]:
    """Calls that were made before, in turn with others: what is remembered of one must not serve another."""
    comm, told = gf.init(), []
    kinds = [("float32", 12), ("float64", 12), ("int32", 700), ("float32", 700), ("bfloat16", 2048)]
    for turn, (dtype, block) in itertools.product(range(4), kinds):
        count = comm.size * block
        inputs = [truth.values([seed, 6, turn], dtype, count, q) for q in range(comm.size)]
        mine, what = inputs[comm.rank], f"rank {comm.rank}: turn {turn} {dtype} {block}"
        x = mine.copy()
        for shape in ((-1,), (comm.size, -1)):
            x[...] = mine
            assert comm.allreduce(x.reshape(shape)) is not None
            _check_sum(comm, "sum", x, inputs, None, f"{what}: allreduce {info(comm)}")
        out = np.empty_like(mine)
        frozen = mine.copy()
        frozen.flags.writeable = bool(turn % 2)
        assert comm.allreduce(frozen, out=out) is out
        truth.check_bits(out, x, f"{what}: out")
        part = comm.reduce_scatter(frozen.reshape(comm.size, block))
        own = slice(comm.rank * block, (comm.rank + 1) * block)
        _check_sum(comm, "sum", part[0], [one[own] for one in inputs], None, f"{what}: reduce_scatter {info(comm)}")
        gathered = comm.allgather(frozen)
        for q, piece in enumerate(inputs):
            truth.check_bits(gathered[q], piece, f"{what}: allgather {q}")
        for root in range(comm.size):
            x[...] = mine
            assert comm.broadcast(x, root) is x
            truth.check_bits(x, inputs[root], f"{what}: broadcast from {root}")
        told.append((what.partition(": ")[2], truth.digest(out)))
    return told
