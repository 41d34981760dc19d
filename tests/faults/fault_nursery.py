"""Owns the process that tests fork ranks from: everything is imported and loaded there, and no communicator exists."""

from __future__ import annotations

import array
import atexit
import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

_PR_SET_PDEATHSIG = 1
_N_FDS = 2
_MAX_NBYTES = 1 << 16


def load() -> None:
    """Loads what ranks would load at their first calls."""
    import numpy.ma  # noqa: F401
    from fault_rank import LOADED

    from gfkernels import engine, kernels
    from gfkernels.transport import cma, shm, tcp, tcp_connect  # noqa: F401
    from gfkernels.types import DTYPES, ReduceOp

    for name in ("host", "network"):
        engine.prepare(kernels.compile_lock, name, lambda: None)
    for dtype in LOADED:
        kernels.combine(ReduceOp.SUM, DTYPES[dtype], None)


def die_with_parent() -> None:
    """The kernel kills this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def become_rank(order: dict[str, Any], reports: int, log: int) -> None:
    """In a forked child: runs a case, and ends as a script of its own would."""
    os.setsid()
    die_with_parent()
    signal.alarm(int(order["limit_s"]))  # whatever happens, not for ever
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where a shell ran the tests with "&"
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    faulthandler.register(signal.SIGUSR1, file=2)
    os.environ.update(order["environment"])
    import fault_rank

    module, _, name = order["case"].partition(":")
    rank = fault_rank.Rank(int(order["environment"]["RANK"]), int(order["environment"]["WORLD_SIZE"]), reports)
    getattr(importlib.import_module(module), name)(rank, *order["arguments"])
    # A case that returns ends without what takes the interpreter most of a second: freeing all that numba has loaded.
    # How ranks end in full is for those cases that exit or raise.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def receive(server: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One order; None at the end."""
    space = socket.CMSG_SPACE(_N_FDS * array.array("i").itemsize)
    data, ancillary, _, _ = server.recvmsg(_MAX_NBYTES, space)
    if not data:
        return None
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
    return dict(json.loads(data)), list(fds)


def serve(server: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Forks on order and tells how children end; returns an order in the child, None when the test run is over."""
    children: dict[int, int] = {}  # process ids by pidfd
    while True:
        ready, _, _ = select.select([server.fileno(), *children], [], [])
        for pidfd in [fd for fd in children if fd in ready]:
            pid, status = os.waitpid(children.pop(pidfd), 0)
            os.close(pidfd)
            server.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())
        if server.fileno() not in ready:
            continue
        found = receive(server)
        if found is None:
            return None
        pid = os.fork()
        if pid == 0:
            for pidfd in children:
                os.close(pidfd)
            server.close()
            return found
        for fd in found[1]:
            os.close(fd)
        children[os.pidfd_open(pid)] = pid
        server.send(json.dumps({"began": pid}).encode())


def main() -> None:
    """Serves until the test run ends; a child falls out of it as a rank, and ends like any script."""
    die_with_parent()
    server = socket.socket(fileno=int(sys.argv[1]))
    load()
    server.send(b'{"loaded": true}')
    found = serve(server)
    if found is not None:
        order, (reports, log) = found
        try:
            become_rank(order, reports, log)
        except Exception:
            # As the interpreter does it, so that sys.excepthook is heard.
            if sys.excepthook is sys.__excepthook__:
                traceback.print_exc()
                sys.exit(1)
            raise


if __name__ == "__main__":
    main()
