"""Owns what ranks do with narrow wires: the same bits by every path, the configuration's default, and its limits."""

from __future__ import annotations

from functools import partial

import exact_sums as truth
import numpy as np
import rank_calls
from rank_async import raises
from rank_calls import Case, Done

import gfkernels as gf

CASES = [
    Case(op, dtype, count, wire=wire, salt=9, wild=wild)
    for dtype in truth.FLOATS
    for wire in truth.WIRES
    for op in ("sum", "mean", "max")
    for count in (60, 9973)
    for wild in (False, True)
]


def every_case(seed: int, memory: str) -> list[str]:
    """Hashes of the results, for comparison with those of other paths."""
    comm = gf.init()
    told = []
    for case in CASES:
        described = Case(case.op, case.dtype, case.count, memory, case.wire, wild=case.wild, salt=case.salt)
        told.append(rank_calls.perform(comm, [seed], described).digest)
    return told


def by_configuration(seed: int) -> list[Done]:
    """A default wire is for floats; integers and bools travel as they are; a call may ask for another one."""
    comm = gf.init()
    assert comm.config.wire == "float16"
    done = [rank_calls.perform(comm, [seed], case) for case in rank_calls.every_op_and_dtype([1, 3001], 0)]
    done += [rank_calls.perform(comm, [seed], Case("sum", "float32", 3001, wire="bfloat16"))]
    # The value that only the wire could have changed shows that it was used.
    x = np.full(5, 1 + 2.0**-12, np.float32)
    assert (comm.allreduce(x.copy()) == comm.size).all()
    assert (comm.allgather(x) == 1).all()
    whole = np.full(5, 2**30 + 1, np.int64)
    assert np.all(comm.allreduce(whole.copy()) == comm.size * (2**30 + 1))
    assert np.all(comm.allgather(whole) == whole)
    y = x.copy()
    comm.broadcast(y)
    truth.check_bits(y, x, "a broadcast moves what is there")
    for call in (comm.allreduce, comm.reduce_scatter, comm.allgather, comm.plan_allreduce):
        raises(gf.UsageError, "int64", partial(call, np.ones(2 * comm.size, np.int64), wire="float16"))
    mixed = [np.full(3, 1 + 2.0**-12, np.float32), np.full(3, 2**30 + 1, np.int64)]
    comm.allreduce_many(mixed)
    assert np.all(mixed[0] == comm.size) and np.all(mixed[1] == comm.size * (2**30 + 1))
    return done


def means_without_overflow() -> list[str]:
    """Contributions whose sum no narrow number holds, and their mean does."""
    comm, told = gf.init(), []
    # What is scaled by 2^-k before may still reach N 2^-k times the mean on its way: k balances overflow and underflow.
    room = 1 / (comm.size * truth.prescale("mean", "float16", None, comm.size))
    for dtype, wire, top in (
        ("float16", None, 65504.0),
        ("bfloat16", None, 3.3e38),
        ("float32", "float16", 65504.0),
        ("float64", "float16", 60000.0),
        ("float32", "bfloat16", 3.3e38),
    ):
        for count in (7, 20_011):
            x = np.full(count, top * min(1.0, 0.99 * room)).astype(truth.numpy_dtype(dtype))
            for array in (x.copy(), rank_calls.Place(dtype, count, registered=True).array):
                array[...] = x
                comm.allreduce(array, "mean", wire=wire)
                got = array.astype(np.float64)
                assert np.isfinite(got).all(), f"mean of {top} in {dtype}, wire {wire}: {got[0]}"
                assert np.allclose(got, x.astype(np.float64), rtol=2.0**-7), (dtype, wire, got[0])
                told.append(truth.digest(array))
            if dtype in truth.NARROW and comm.size > 2:
                assert np.isinf(comm.allreduce(x.copy(), "sum").astype(np.float64)).all()
            block = comm.reduce_scatter(np.tile(x, comm.size), "mean", wire=wire)
            assert np.allclose(block.astype(np.float64), x.astype(np.float64), rtol=2.0**-7)
    return told
