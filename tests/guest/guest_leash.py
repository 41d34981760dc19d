"""Owns that no emulator outlives whoever started it: runs a command and kills it when the parent process is gone.

A process of its own, because the kernel's parent-death signal goes by the *thread* that forked, and guests are started
from threads. Run as `python guest_leash.py PARENT_PID COMMAND…`; SIGTERM and SIGINT kill the command too.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    """Runs the command; its exit status, 128 + the signal where one ended it."""
    watched_parent = os.pidfd_open(parent)
    if os.getppid() != parent:
        return 1
    child = os.fork()
    if child == 0:
        # Covers a SIGKILL of this process itself, whose only thread this is.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.execvp(command[0], command)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.kill(child, signal.SIGKILL))
    watched_child = os.pidfd_open(child)
    readable, _, _ = select.select([watched_parent, watched_child], [], [])
    if watched_parent in readable:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
