"""Owns what ranks in two network namespaces do: join with everything said explicitly, and reduce over the wire."""

from __future__ import annotations

import os
from typing import Any

import exact_sums as truth
import numpy as np

import gfkernels as gf

SECRET = "for two namespaces"


def join(size: int, store: str, interface: str) -> tuple[str, int]:
    """Joins with arguments, not with a launcher's variables; gives the transport and the number of ranks."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ[f"TOLD_{name}"] = os.environ.pop(name)
    comm = gf.init(
        rank=int(os.environ["TOLD_RANK"]),
        size=size,
        store=store,
        secret=SECRET,
        interface=interface,
        transport="tcp",
        plan="ring",
    )
    return comm.transport, comm.size


def reduce(seed: int, count: int, turns: int, wire: str | None) -> list[str]:
    """Some allreduces; gives hashes of the results."""
    comm, told = gf.default_communicator(), []
    for turn in range(turns):
        inputs = [truth.values([seed, turn], "float32", count, q) for q in range(comm.size)]
        x = inputs[comm.rank].copy()
        comm.allreduce(x, wire=wire)
        truth.within_bound("sum", x, inputs, wire, f"rank {comm.rank}, wire {wire}")
        told.append(truth.digest(x))
    return told


def others(seed: int) -> list[str]:
    """The remaining collectives, small and large, and a mismatch of neither."""
    comm, told = gf.default_communicator(), []
    for count in (1, 50_001):
        whole = comm.allgather(truth.values([seed], "int32", count, comm.rank))
        told.append(truth.digest(whole))
        block = comm.reduce_scatter(whole.reshape(-1).copy())
        assert (block == whole[comm.rank] * np.int32(comm.size)).all()
        x = whole[comm.rank].copy()
        comm.broadcast(x, comm.size - 1)
        told.append(truth.digest(x))
        comm.barrier()
    xs: list[Any] = [np.full(7, 1.0), np.full(30_000, comm.rank, np.int64)]
    comm.allreduce_many(xs)
    assert (xs[0] == comm.size).all() and (xs[1] == sum(range(comm.size))).all()
    return told
