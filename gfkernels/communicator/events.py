"""Owns news about peers: who died, left, aborted, refused or is out of a call; read once, handed to who it concerns."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from gfkernels.bootstrap import Session, close_in_child, forget
from gfkernels.native.jit import njit
from gfkernels.native.memory import load_acquire

_GRACE_S: Final = 0.1
"""A process that says goodbye and ends may be seen ending before its goodbye is read."""


@njit
def _load(address: int) -> int:
    return load_acquire(address)  # type: ignore[no-any-return]


class Watcher(Protocol):
    """Polls descriptors of this object; told when one has nothing more to say."""

    def drop_fd(self, fd: int) -> None:
        """Stop polling this descriptor."""


class Events:
    """The news of one world. Safe for threads.

    Attributes:
        left: world ranks that left in order.
        lost: world ranks that died, with how it was noticed.
        left_flags: where same-host ranks note in shared memory that they leave, by world rank.
        pidfds: by world rank, readable once its process has ended.
    """

    def __init__(self, session: Session) -> None:
        self.left: set[int] = set()
        self.lost: dict[int, str] = {}
        self.left_flags: dict[int, int] = {}
        self.pidfds: dict[int, int] = {}
        self._session = session
        self._lock = threading.RLock()
        self._inboxes: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
        self._watchers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._closed = False
        self._pid = os.getpid()

    @property
    def fds(self) -> list[int]:
        """What is readable while there is news."""
        return [self._session.control.fileno(), *self.pidfds.values()]

    def watch(self, rank: int, pidfd: int) -> None:
        """Takes over a descriptor of a peer's process."""
        self.pidfds[rank] = close_in_child(pidfd)

    def add_watcher(self, watcher: Watcher) -> None:
        """Is told of descriptors that are dropped."""
        self._watchers.add(watcher)

    def post(self, event: dict[str, Any], to: Sequence[int] | None = None) -> bool:
        """Sends an event to world ranks; False where it cannot be passed on."""
        return not self._closed and self._session.control.post(event, to)

    def take(self, name: str) -> list[dict[str, Any]]:
        """Reads all news; the events of one communicator that have come since the last time."""
        with self._lock:
            self._read()
            inbox = self._inboxes[name]
            found = list(inbox)
            inbox.clear()
            return found

    def gone(self, rank: int) -> str:
        """Why a world rank will never answer again; "" while it may."""
        if rank in self.lost:
            return self.lost[rank]
        return "left" if rank in self.left else ""

    def ended(self, rank: int) -> bool:
        """Whether a world rank's process is known to have ended: it writes into nobody's memory any more."""
        pidfd = self.pidfds.get(rank)
        if pidfd is not None and not self._closed and os.getpid() == self._pid:
            return _readable(pidfd)
        return rank in self.lost

    def close(self) -> None:
        """Gives the descriptors back; what is known stays known."""
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._read()
            self._closed = True
            for pidfd in self.pidfds.values():
                forget(pidfd)
                with contextlib.suppress(OSError):
                    os.close(pidfd)

    def _read(self) -> None:
        if self._closed:
            return
        self._read_control()
        ended = [rank for rank, pidfd in self.pidfds.items() if self._is_news(rank) and _readable(pidfd)]
        if ended:
            self._end(ended)

    def _is_news(self, rank: int) -> bool:
        return rank not in self.lost and rank not in self.left

    def _end(self, ranks: list[int]) -> None:
        deadline = time.monotonic() + _GRACE_S
        while True:
            for rank in [r for r in ranks if r in self.left_flags and _load(self.left_flags[r])]:
                self.left.add(rank)
            self._read_control()
            ranks = [rank for rank in ranks if rank not in self.left]
            if not ranks or time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        for rank in ranks:
            self.lost.setdefault(rank, "its process ended without a goodbye")

    def _read_control(self) -> None:
        for event in self._session.control.take():
            kind, rank = event.get("event"), event.get("rank")
            if kind == "left" and isinstance(rank, int):
                self.left.add(rank)
            elif kind == "lost" and isinstance(rank, int):
                flag = self.left_flags.get(rank)
                if flag and _load(flag):
                    self.left.add(rank)
                else:
                    self.lost.setdefault(rank, "its connection ended without a goodbye")
            elif isinstance(event.get("comm"), str):
                self._inboxes[event["comm"]].append(event)
        for rank in [*self.left, *self.lost]:
            pidfd = self.pidfds.get(rank)
            if pidfd is not None:
                for watcher in list(self._watchers):
                    watcher.drop_fd(pidfd)


def _readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
