"""Owns what a case has on its rank: reports to the test, words from it, calls that should fail, a list of resources."""

from __future__ import annotations

import gc
import json
import os
import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOADED = ("float32", "float64", "int32")
"""Element types whose sums the nursery loads."""


class Rank:
    """This process, as the test sees it.

    Args:
        rank, size: its place.
        reports: descriptor of a socket to the test.
    """

    def __init__(self, rank: int, size: int, reports: int) -> None:
        self.rank, self.size = rank, size
        self._socket = socket.socket(fileno=reports)
        self._words = self._socket.makefile("r")

    def report(self, what: str, **facts: Any) -> None:
        """Tells the test something."""
        self._socket.sendall(json.dumps({"what": what, "at": time.monotonic(), **facts}).encode() + b"\n")

    def hear(self) -> str:
        """Waits for the test's next word."""
        return self._words.readline().strip()

    def fails(self, call: Callable[[], Any], what: str = "call") -> BaseException | None:
        """Makes a call that should fail; reports when and how it ended."""
        began = time.monotonic()
        try:
            call()
        except BaseException as error:
            again = pickle.loads(pickle.dumps(error))
            kept = (type(again), str(again), getattr(again, "table", None), getattr(again, "rank", None))
            self.report(
                what,
                error=type(error).__name__,
                kinds=[kind.__name__ for kind in type(error).__mro__],
                message=str(error),
                seconds=time.monotonic() - began,
                rank=getattr(error, "rank", None),
                table=getattr(error, "table", None),
                picklable=kept
                == (type(error), str(error), getattr(error, "table", None), getattr(error, "rank", None)),
            )
            return error
        self.report(what, error=None, seconds=time.monotonic() - began)
        return None


def resources() -> dict[str, int]:
    """What this process has open: descriptors, threads, and mappings of shared memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "memfds": sum("memfd:" in line for line in maps),
    }
