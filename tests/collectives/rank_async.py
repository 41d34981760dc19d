"""Owns what ranks do with asynchronous calls, split communicators, threads, and the beginning and end of it all."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import exact_sums as truth
import numpy as np
from exact_sums import Array

import gfkernels as gf


def raises(kind: type[BaseException], text: str, call: Callable[[], Any]) -> None:
    """The call raises this, and its message holds the text."""
    try:
        call()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error}"
        return
    raise AssertionError(f"no {kind.__name__} with {text!r}")


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Makes the calls at once, each in a thread of its own; raises what they raise."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int, call: Callable[[], Any]) -> None:
        try:
            results[number] = call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=one) for one in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread is stuck"
    if errors:
        raise errors[0]
    return results


def _arrays(seed: int, counts: list[int], rank: int, dtype: str = "float32") -> list[Array]:
    return [truth.values([seed, 6, i], dtype, count, rank) for i, count in enumerate(counts)]


COUNTS = [1, 5000, 300_003, 3, 70_001, 0, 2049]


def in_flight(seed: int) -> list[str]:
    """Several calls at once, of all kinds, whose results are those of calls one after the other, in program order."""
    comm = gf.init()
    inputs = _arrays(seed, COUNTS, comm.rank)
    blocking = [comm.allreduce(x.copy()) for x in inputs]
    memory = [gf.empty(x.size) if i % 2 else np.empty_like(x) for i, x in enumerate(inputs)]
    for place, x in zip(memory, inputs, strict=True):
        place[...] = x
    works = [comm.allreduce(place, async_op=True) for place in memory]
    gathered = comm.allgather(inputs[1], async_op=True)
    block = comm.reduce_scatter(np.arange(6 * comm.size, dtype=np.int64), async_op=True)
    sent = comm.broadcast(np.full(4, comm.rank), comm.size - 1, async_op=True)
    out = np.empty(5000, np.float32)
    into = comm.allreduce(inputs[1], out=out, async_op=True)
    last = np.ones(7)
    assert comm.allreduce(last)[0] == comm.size
    # A blocking call comes after all that was asked for before.
    assert all(work.done() for work in [*works, gathered, block, sent, into])
    for work, place, want in zip(works, memory, blocking, strict=True):
        assert work.wait() is place and work.result is place
        work.synchronize()
        truth.check_bits(place, want, "asynchronous")
    assert into.result is out
    truth.check_bits(out, blocking[1], "out")
    assert gathered.result.shape == (comm.size, 5000)
    truth.check_bits(gathered.result[comm.rank], inputs[1], "gathered")
    first = 6 * comm.rank
    assert (block.result == np.arange(first, first + 6) * comm.size).all()
    assert (sent.result == comm.size - 1).all()
    return [truth.digest(place) for place in memory]


def in_order(turns: int) -> None:
    """Calls on the same array, each seeing the one before."""
    comm = gf.init()
    x = np.ones(3000, np.float64)
    works = [comm.allreduce(x, async_op=True) for _ in range(turns)]
    assert works[-1].wait() is x and all(work.done() for work in works)
    assert (x == float(comm.size) ** turns).all()


def dropped(seed: int) -> list[str]:
    """Handles, and all names of the arrays, go away at once; the calls happen, in memory that nobody else gets."""
    comm = gf.init()
    want = [truth.digest(comm.allreduce(x)) for x in _arrays(seed, [200_000] * 4, comm.rank)]
    kept = []
    for i, x in enumerate(_arrays(seed, [200_000] * 4, comm.rank)):
        if i % 2:
            kept.append((i, x))
            comm.allreduce(x, async_op=True)
        else:
            place = gf.empty(x.size)
            place[:] = x
            comm.allreduce(place, async_op=True)
            del place
        del x
        gc.collect()
        other = gf.empty(200_000)  # would be the same block, had it been given back
        other[:] = -3
        kept.append((-1, other))
    comm.barrier()
    for i, x in kept:
        if i < 0:
            assert (x == -3).all(), "a call wrote into memory that was given to somebody else"
        else:
            assert truth.digest(x) == want[i]
    return want


def waits_run_out() -> None:
    """A wait that runs out leaves the call going; it completes once the last rank comes, also for another thread."""
    comm = gf.init()
    if comm.rank == comm.size - 1:
        time.sleep(2.0)
    x = np.ones(5)
    began = time.monotonic()
    work = comm.allreduce(x, async_op=True)
    if comm.rank != comm.size - 1:
        for seconds in (0.0, 0.15):
            raises(gf.WaitTimeout, "goes on", partial(work.wait, seconds))
        assert time.monotonic() - began < 1.8 or work.done(), "wait(timeout) took far too long"
        assert isinstance(_error(lambda: work.wait(0)), TimeoutError | type(None))
    (result,) = in_threads(lambda: work.wait(30))
    assert result is x and work.done() and (x == comm.size).all()
    assert comm.is_usable


def _error(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def done_by_itself() -> None:
    """Nobody waits: the progress thread runs the calls."""
    comm = gf.init()
    works = [comm.allreduce(np.ones(count), async_op=True) for count in (10, 100_000, 5)]
    deadline = time.monotonic() + 30
    while not all(work.done() for work in works):
        assert time.monotonic() < deadline, "no progress without a waiting thread"
        time.sleep(0.002)
    assert all((work.result == comm.size).all() for work in works)


def split() -> list[list[int]]:
    """Colors, keys, none at all, nested, and unused ones that are dropped."""
    comm = gf.init()
    r, n = comm.rank, comm.size
    groups = []
    for color, key in ((r % 2, 0), (r % 2, -r), (0, 100 - r), (r, 0), (r // 2, (r * 7) % 5)):
        part = comm.split(color, key)
        assert part is not None
        x = np.full(3001, 2.0**r)
        part.allreduce(x)
        members = part.allgather(np.array([r])).reshape(-1)
        assert (x == float(np.sum(2.0**members))).all()
        assert members[part.rank] == r and part.size == len(members)
        groups.append([int(q) for q in members])
        part.shutdown()
    alone = comm.split(None if r else 7)
    assert (alone is None) == bool(r)
    if alone is not None:
        assert alone.size == 1 and alone.allreduce(np.ones(3)).sum() == 3
    half = comm.split(r % 2)
    assert half is not None
    quarter = half.split(half.rank % 2, -half.rank)
    assert quarter is not None
    y = np.full(40_000, float(r))
    quarter.allreduce(y)
    assert (y == sum(q for q in range(n) if q % 4 == r % 4)).all()
    raises(gf.UsageError, "color", lambda: comm.split("red"))  # type: ignore[arg-type]
    half.shutdown()  # and with it the quarter
    raises(gf.CommunicatorBroken, "", lambda: quarter.barrier())
    assert (comm.allreduce(np.ones(2)) == n).all()
    return groups


def two_communicators_at_once(turns: int) -> None:
    """Two threads with a communicator each, at their own pace, blocking and asynchronous."""
    comm = gf.init()
    one, two = comm.split(0), comm.split(0)
    assert one is not None and two is not None

    def use(part: gf.Communicator, step: int) -> None:
        for i in range(turns):
            count = 1 + i * step
            x = np.full(count, 1.0)
            if i % 3:
                part.allreduce(x)
            else:
                part.allreduce(x, async_op=True).wait()
            assert (x == comm.size).all(), (step, i)

    in_threads(lambda: use(one, 50), lambda: use(two, 1717))
    one.shutdown()
    two.shutdown()


def two_threads_on_one() -> None:
    """The second thread is refused; the first one's call is not harmed."""
    comm = gf.init()
    if comm.rank:
        time.sleep(0.8)
        comm.allreduce(np.ones(5))
        return
    entered = threading.Event()

    def first() -> Any:
        entered.set()
        return comm.allreduce(np.ones(5))

    def second() -> None:
        entered.wait()
        time.sleep(0.3)
        raises(gf.UsageError, "another thread", lambda: comm.allreduce(np.ones(5)))

    result, _ = in_threads(first, second)
    assert (result == comm.size).all()


def life() -> None:
    """init twice, with other settings, after the end; context managers; calls before and after."""
    comm = gf.init()
    assert gf.init() is comm is gf.default_communicator() and gf.is_initialized()
    assert (gf.rank(), gf.size()) == (comm.rank, comm.size) == (gf.local_rank(), gf.local_size())
    raises(gf.UsageError, "shutdown", lambda: gf.init(timeout_s=17))
    raises(gf.UsageError, "shutdown", lambda: gf.init(rank=0, size=comm.size + 1, store="127.0.0.1:9"))
    raises(gf.ConfigError, "transport", lambda: gf.init(trensport="tcp"))
    assert gf.allreduce(np.ones(3))[0] == comm.size
    gf.shutdown()
    gf.shutdown()
    assert not gf.is_initialized()
    raises(gf.UsageError, "gfkernels.init", lambda: gf.allreduce(np.ones(2)))
    raises(gf.UsageError, "gfkernels.init", gf.barrier)
    raises(gf.CommunicatorBroken, "shut down", lambda: comm.allreduce(np.ones(2)))
    handle = None
    for turn in range(3):
        with gf.init() as again:
            assert again is not comm and again.allreduce(np.ones(2))[0] == again.size
            handle = again.plan_allreduce(np.ones(4))
            handle()
            if turn == 2:
                again.allreduce(np.ones(100_000), async_op=True)  # finished by leaving
    if comm.size > 1:
        assert handle is not None
        raises(gf.CommunicatorBroken, "", handle)
    memory = gf.zeros(50)  # outlives every communicator
    with gf.init():
        assert (gf.allreduce(memory) == 0).all()
    assert len(os.listdir("/proc/self/fd")) < 100


def sizes_of_memory_differ() -> None:
    """Each rank has other `staging_bytes` and `inline_bytes`: all use the least, and nobody writes beside them."""
    rank = int(os.environ["RANK"])
    comm = gf.init(staging_bytes=(16 << 20, 1 << 20, 256 << 10)[rank], inline_bytes=(4096, 20_000, 8192)[rank])
    registered = [gf.empty(1 << 16, np.uint8) for _ in range(16)]
    for array in registered:
        array[...] = rank
    for turn in range(60):
        # Through INLINE on all ranks, or on none though some could, and through STAGE.
        for count in (256, 1024, 2048, 16384):
            x = np.full(count, rank + turn, np.float32)
            comm.allreduce(x)
            assert (x == 3 + 3 * turn).all(), f"turn {turn}, {count} elements: {x}"
    for array in registered:
        assert (array == rank).all(), "a peer wrote into an array"
