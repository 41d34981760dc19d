"""In a guest: collectives through the public API over queue pairs, by forked ranks, and what they do when one fails.

Where `GUEST_HOSTS` is 2 both guests run `two_hosts`, with two ranks each, and let "auto" find the card.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from guest_rig import main, run_ranks

import gfkernels as gf
from gfkernels import engine, kernels
from gfkernels.communicator.start import load_all
from gfkernels.transport.meeting import Exchange
from gfkernels.types import DTYPES, ReduceOp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "collectives"))

import exact_sums as truth
import rank_calls
from rank_calls import Case

PORT = 5990
SECRET = "for ranks in guests"
KERNELS = [("sum", "float32"), ("mean", "bfloat16"), ("max", "float64"), ("prod", "int32"), ("min", "uint8")]
"""A sample: every other combination runs the same way, and each has to be compiled."""
COUNTS = (0, 1, 3, 1000, 2048, 30_011)
"""Nothing, fewer than ranks, one frame, more than one frame, a ring with a rest."""
_seed = 7


def cases(counts: tuple[int, ...] = COUNTS) -> list[Case]:
    """All kinds of memory, in and out of place, aligned and not, in turns."""
    found = []
    for number, count in enumerate(counts):
        for turn, (op, dtype) in enumerate(KERNELS):
            memory = rank_calls.MEMORIES[(number + turn) % 3]
            found.append(Case(op, dtype, count, memory, out=turn % 2 == 1, offset=(number + turn) % 2))
    found.append(Case("sum", "float32", 500_009, "registered"))
    found.append(Case("sum", "float32", 200_003, "mixed"))
    found.append(Case("sum", "float32", 100_003, "ordinary", wire="float16"))
    return found


def others(comm: gf.Communicator) -> None:
    """The remaining collectives, small and large."""
    for count in (1, 50_001):
        mine = truth.values([_seed], "float32", count, comm.rank)
        whole = comm.allgather(mine)
        for q in range(comm.size):
            truth.check_bits(whole[q], truth.values([_seed], "float32", count, q), f"allgather, rank {q}")
        x = gf.empty(count)
        x[:] = mine
        comm.broadcast(x, comm.size - 1)
        truth.check_bits(x, truth.values([_seed], "float32", count, comm.size - 1), "broadcast")
        block = comm.reduce_scatter(whole.reshape(-1).copy())
        assert abs(block - whole[comm.rank] * comm.size).max() < 1e-4
        comm.barrier()


def join(rank: int, size: int, transport: str, address: str = "127.0.0.1", **options: Any) -> gf.Communicator:
    """A communicator of forked ranks, which no launcher has told anything."""
    return gf.init(
        rank=rank, size=size, store=f"{address}:{PORT}", secret=SECRET, transport=transport,
        log="info", verbs_timeout=16, verbs_retry_count=3, **options,
    )  # fmt: skip


def work(rank: int, size: int, transport: str, **options: Any) -> None:
    """Everything that a group can do."""
    with join(rank, size, transport, **options) as comm:
        assert comm.transport == transport
        for case in cases():
            assert rank_calls.perform(comm, [_seed], case).path == transport
        others(comm)
        half = comm.split(comm.rank % 2)
        assert half is not None
        with half:
            x = truth.values([_seed], "float32", 1000, half.rank)
            half.allreduce(x)
            assert half.size == 1 or half.transport == transport


def two_ranks() -> None:
    """Machine code."""
    run_ranks(lambda rank, exchange: work(rank, 2, "verbs"), 2)


def four_ranks() -> None:
    """More ranks than cores."""
    run_ranks(lambda rank, exchange: work(rank, 4, "verbs"), 4)


def through_pyverbs() -> None:
    """The reference path gives the same bits."""

    def part(rank: int, exchange: Exchange) -> None:
        told = []
        for path in ("compiled", "pyverbs"):
            with join(rank, 2, "verbs", verbs_path=path) as comm:
                told.append([rank_calls.perform(comm, [_seed], case).digest for case in cases((3, 1000, 30_011))])
        assert told[0] == told[1]

    run_ranks(part, 2)


def a_killed_peer() -> None:
    """Named by every rank that is left, in under five seconds on this slow machine."""

    def part(rank: int, exchange: Exchange) -> None:
        comm = join(rank, 3, "verbs")
        x = gf.empty(300_000)
        x[:] = 1
        comm.allreduce(x)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        since = time.monotonic()
        error = _fails(lambda: [comm.allreduce(x) for _ in range(1000)], gf.PeerLostError)
        assert error.rank == 1, error
        assert time.monotonic() - since < 5
        assert "rank 1" in str(_fails(lambda: comm.allreduce(x), gf.CommunicatorBroken))

    run_ranks(part, 3, killed=(1,))


def a_mismatch() -> None:
    """Every rank gets the table."""

    def part(rank: int, exchange: Exchange) -> None:
        comm = join(rank, 2, "verbs")
        x = gf.empty(100_000 + rank)
        x[:] = 1
        error = _fails(lambda: comm.allreduce(x), gf.MismatchError)
        assert "100000" in str(error) and "100001" in str(error), error

    run_ranks(part, 2)


def two_hosts() -> None:
    """Two ranks in each of two guests: `auto` takes the card."""
    guest = int(os.environ["GUEST"])

    def part(rank: int, exchange: Exchange) -> None:
        comm = join(2 * guest + rank, 4, "auto", "10.77.0.1", interface="eth0")
        assert comm.transport == "verbs", comm.transport
        for case in cases((3, 1000, 30_011)):
            assert rank_calls.perform(comm, [_seed], case).path == "verbs"
        others(comm)
        gf.shutdown()

    run_ranks(part, 2)


def warm_up() -> None:
    """Where the code is compiled for the guest: the same calls, by ranks without a card."""
    run_ranks(lambda rank, exchange: work(rank, 2, "tcp"), 2)


def _fails(call: Callable[[], object], kind: type[Exception]) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def load() -> None:
    """Loads all code before the ranks are forked: each would take this slow machine's seconds for it."""
    engine.prepare(kernels.compile_lock, "rdma", load_all)
    wired = (ReduceOp.SUM, DTYPES["float32"], DTYPES["float16"])
    kernels.prepare([wired, *((ReduceOp[op.upper()], DTYPES[dtype], None) for op, dtype in KERNELS)])


if __name__ == "__main__":
    load()
    sys.exit(main(two_ranks, four_ranks, through_pyverbs, a_killed_peer, a_mismatch, two_hosts, warm_up))
