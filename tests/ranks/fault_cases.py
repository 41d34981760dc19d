"""What ranks do in test_faults.py: calls that are to fail, and a report of how they did."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import gfkernels as gf

SELF = int(os.environ["RANK"])
VICTIM = int(sys.argv[2]) if len(sys.argv) > 2 else 1


def report(**facts: Any) -> None:
    """One line for the test to read."""
    sys.stdout.write(f"REPORT {json.dumps(facts)}\n")
    sys.stdout.flush()


def fails(call: Callable[[], Any], what: str = "call") -> BaseException | None:
    """Makes a call that should fail, and reports when and how."""
    try:
        call()
    except BaseException as error:
        again = pickle.loads(pickle.dumps(error))
        report(
            what=what, error=type(error).__name__, kinds=[kind.__name__ for kind in type(error).__mro__],
            message=str(error), at=time.time(), rank=getattr(error, "rank", None), table=getattr(error, "table", None),
            picklable=str(again) == str(error),
        )  # fmt: skip
        return error
    report(what=what, error=None, at=time.time())
    return None


def resources() -> dict[str, int]:
    """What a process may leak."""
    maps = Path("/proc/self/maps").read_text()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "memfds": maps.count("memfd:"),
    }


def until_it_fails(size: int = 50_000) -> None:
    """Calls until one raises."""
    x = np.ones(size, np.float32)
    while True:
        x[:] = 1
        gf.allreduce(x)


def case_die(comm: gf.Communicator) -> None:
    """The victim is killed from outside while all call as fast as they can."""
    if SELF == VICTIM and "fork" in sys.argv:
        child = os.fork()
        if child == 0:
            os.closerange(0, 3)  # what reads the rank's output must not wait for the child
            time.sleep(60)
            os._exit(0)
    print("READY", flush=True)
    fails(until_it_fails)
    fails(lambda: gf.allreduce(np.ones(3)), "after")
    gf.shutdown()


def case_die_idle(comm: gf.Communicator) -> None:
    """The victim dies while the others wait for it."""
    print("READY", flush=True)
    if SELF == VICTIM:
        time.sleep(60)
    fails(lambda: gf.allreduce(np.ones(200_000)))
    fails(lambda: gf.allreduce(np.ones(3)), "after")


def case_stop(comm: gf.Communicator) -> None:
    """The victim is stopped in the middle of large calls; survivors reuse the memory, which must stay theirs."""
    count = 2_000_000
    registered = "registered" in sys.argv
    x = gf.empty(count) if registered else np.empty(count, np.float32)
    x[:] = 1
    gf.allreduce(x)
    print("READY", flush=True)

    def loop() -> None:
        while True:
            x[:] = 1
            gf.allreduce(x)

    error = fails(loop)
    assert error is not None
    if SELF != VICTIM:
        error.__traceback__ = None
        del x, loop
        others = [(gf.empty(count) if registered else np.empty(count, np.float32)) for _ in range(3)]
        for other in others:
            other[:] = -7
        print("REUSED", flush=True)
        sys.stdin.readline()
        time.sleep(1.0)
        report(what="untouched", clean=all(bool(np.all(other == -7)) for other in others))
    fails(lambda: gf.allreduce(np.ones(3)), "after")


def case_pause(comm: gf.Communicator) -> None:
    """A short stop of any rank harms nobody."""
    print("READY", flush=True)
    x = np.ones(1000)
    for _ in range(30):
        x[:] = 1
        gf.allreduce(x)
        time.sleep(0.05)
    report(what="sum", value=float(x[0]))
    gf.barrier()


def case_interrupt(comm: gf.Communicator) -> None:
    """The victim gets Ctrl-C in a call of the named way."""
    way = sys.argv[3]
    x = np.ones(1000)
    handle = gf.plan_allreduce(x)
    gf.allreduce(x)
    print("READY", flush=True)
    if SELF == 2:
        time.sleep(2.5)
        fails(lambda: gf.allreduce(x))
        return
    calls: dict[str, Callable[[], Any]] = {
        "call": lambda: gf.allreduce(x),
        "handle": handle,
        "wait": lambda: gf.allreduce(x, async_op=True).wait(),
    }
    fails(calls[way])
    fails(lambda: gf.allreduce(np.ones(3)), "after")


def case_mismatch(comm: gf.Communicator) -> None:
    """Ranks ask for different things."""
    x = np.ones(12, np.float32)
    gf.barrier()  # or a rank that starts slowly would be "not in the call"
    odd = SELF == 1
    calls: dict[str, Callable[[], Any]] = {
        "count": lambda: gf.allreduce(x[:11] if odd else x),
        "dtype": lambda: gf.allreduce(x.view(np.int32) if odd else x),
        "op": lambda: gf.allreduce(x, "max" if odd else "sum"),
        "order": lambda: gf.barrier() if odd else gf.allreduce(x),
        "wire": lambda: gf.allreduce(x, wire="float16" if odd else None),
        "root": lambda: gf.broadcast(x, 1 if odd else 0),
        "list": lambda: gf.allreduce_many([x] if odd else [x[:6], x[6:]]),
    }
    if sys.argv[3] == "absent":
        if SELF == 2:
            time.sleep(4)
            return
        fails(calls["count"])
    else:
        fails(calls[sys.argv[3]])
    report(what="array", clean=bool(np.all(x == 1)))
    fails(lambda: gf.allreduce(x), "after")


def case_refuse(comm: gf.Communicator) -> None:
    """A rank's own bad array; then everybody goes on."""
    frozen = np.ones(5)
    frozen.flags.writeable = False
    way = sys.argv[3]
    if way == "all" or SELF == VICTIM:
        if way == "late":
            time.sleep(0.5)
        fails(lambda: gf.allreduce(frozen))
    elif way == "late":
        fails(lambda: gf.allreduce(np.ones(5)))
    else:
        time.sleep(0.5)
    for _ in range(50):
        x = np.ones(5)
        gf.allreduce(x)
        assert np.all(x == comm.size)
    report(what="went on")


def case_leave(comm: gf.Communicator) -> None:
    """Ranks end in several ways; those that still need them raise, those that do not, do not."""
    way = sys.argv[3]
    if SELF == VICTIM:
        if way == "shutdown":
            gf.shutdown()
        elif way == "exit":
            sys.exit(0)
        elif way == "crash":
            raise ValueError("boom")
        elif way == "_exit":
            os._exit(5)
        elif way == "abort":
            comm.abort("enough")
        return
    fails(lambda: gf.allreduce(np.ones(9)))


def case_last_call(comm: gf.Communicator) -> None:
    """Every rank leaves as soon as its last call is over, at random times."""
    rng = np.random.default_rng(SELF)
    for _ in range(25):
        part = gf.init()
        x = np.ones(int(rng.integers(1, 2)) * 3000)
        gf.allreduce(x)
        time.sleep(float(rng.random()) * 0.01)
        gf.allreduce(x)
        assert np.all(x == part.size**2)
        gf.shutdown()
    report(what="done")


def case_again(comm: gf.Communicator) -> None:
    """After a break the same processes start anew; many times, without leaving anything behind."""
    comm.abort("on purpose") if SELF == 0 else fails(lambda: gf.barrier())
    before: dict[str, int] = {}
    for i in range(12):
        with gf.init() as fresh:
            x = gf.empty(50_000)
            x[:] = 1
            fresh.allreduce(x)
            fresh.allreduce(np.ones(5), async_op=True).wait()
            part = fresh.split(0)
            assert part is not None
            part.allreduce(x)
            assert x[0] == fresh.size**2
            fresh.barrier()
        del x, part, fresh
        if i == 3:
            before = resources()
    after = resources()
    report(what="leaks", before=before, after=after)


def case_fork(comm: gf.Communicator) -> None:
    """A forked child may not call, may start alone, and takes nothing with it when it ends."""
    x = np.ones(5)
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            try:
                gf.allreduce(x)
            except gf.UsageError:
                with gf.init(rank=0, size=1) as alone:
                    status = 0 if alone.allreduce(np.ones(3))[0] == 1 else 2
        os._exit(status)
    _, status = os.waitpid(child, 0)
    for _ in range(20):
        x[:] = 1
        gf.allreduce(x)
        assert np.all(x == comm.size)
    report(what="fork", status=status)


def case_memory(comm: gf.Communicator) -> None:
    """A shortage is an error of the call that asked; large arrays need no /dev/shm."""
    if "arena" in sys.argv:
        fails(lambda: gf.empty(100 << 20))
    else:
        x = gf.empty(50 << 20)
        x[:] = 1
        gf.allreduce(x)
        y = np.ones(30 << 20, np.float32)
        gf.allreduce(y)
        stat = os.statvfs("/dev/shm")
        report(what="sums", x=float(x[-1]), y=float(y[-1]), shm=stat.f_blocks * stat.f_frsize)
    gf.barrier()


if __name__ == "__main__":
    globals()[f"case_{sys.argv[1]}"](gf.init())
