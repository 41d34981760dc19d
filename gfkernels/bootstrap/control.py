"""Owns control events: who died, left, aborted or refused a call, on a descriptor that wait loops can poll."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from gfkernels.bootstrap.forks import close_in_child, forget
from gfkernels.bootstrap.frames import FrameError, FrameReader, encode
from gfkernels.bootstrap.store import send_all, wait_readable

_POST_S: Final = 2.0
_GOODBYE_S: Final = 0.3


class Control(Protocol):
    """The control connection of a rank.

    Events that the server makes: `{"event": "lost", "rank": r}` (its connection ended without a goodbye: it died) and
    `{"event": "left", "rank": r}`. All others are as posted.
    """

    def fileno(self) -> int:
        """A descriptor that is readable while events wait (-1 in a world of one, which poll(2) ignores)."""

    def take(self) -> list[dict[str, Any]]:
        """The events that have arrived, in order; never waits."""

    def post(self, event: dict[str, Any], to: Sequence[int] | None = None) -> bool:
        """Sends an event to all other ranks, or to those named; False where rank 0, which passes it on, is gone."""

    def goodbye(self) -> None:
        """Announces that this rank leaves on purpose."""

    def close(self) -> None:
        """Closes the connection (without `goodbye` the others see this rank as lost)."""


class TcpControl:
    """The control connection over a socket to rank 0's server."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.rank = rank
        self._sock = close_in_child(sock)
        self._sock.setblocking(False)
        self._reader = FrameReader()
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._ended = False
        self._quiet: tuple[int, int] | None = None
        self._pid = os.getpid()

    def fileno(self) -> int:
        """See `Control.fileno`; the number stays the same and valid until `close`."""
        return self._sock.fileno()

    def take(self) -> list[dict[str, Any]]:
        """See `Control.take`."""
        events: list[dict[str, Any]] = []
        with self._lock:
            while not self._ended and os.getpid() == self._pid:
                try:
                    data = self._sock.recv(1 << 16)
                    events += self._reader.feed(data)
                except (BlockingIOError, InterruptedError):
                    break
                except (OSError, FrameError):
                    data = b""
                if not data:
                    self._end()
                    if self.rank != 0 and not any(e.get("event") == "left" and e.get("rank") == 0 for e in events):
                        events.append({"event": "lost", "rank": 0})
        return events

    def _end(self) -> None:
        # An end of file stays readable for ever and would wake every wait loop: put a silent pipe under the number.
        self._ended = True
        descriptor = self._sock.fileno()
        if descriptor >= 0:
            self._quiet = os.pipe()
            for end in self._quiet:
                close_in_child(end)
            os.dup2(self._quiet[0], descriptor, inheritable=False)

    def post(self, event: dict[str, Any], to: Sequence[int] | None = None) -> bool:
        """See `Control.post`."""
        return self._send({"post": event, "to": None if to is None else list(to)})

    def goodbye(self) -> None:
        """See `Control.goodbye`."""
        if not self._send({"goodbye": True}):
            return
        # Closing with unread events makes the kernel send a reset, which can overtake the goodbye; so let the server
        # close first, and read what still comes.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            end = time.monotonic() + _GOODBYE_S
            while wait_readable(self._sock, end - time.monotonic()) and self._sock.recv(1 << 16):
                pass

    def _send(self, message: dict[str, Any]) -> bool:
        with self._send_lock:
            if self._ended or os.getpid() != self._pid:
                return False
            try:
                send_all(self._sock, encode(message), time.monotonic() + _POST_S)
            except TimeoutError:
                # Rank 0 is stopped and the connection full; half a frame may be out.
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_WR)
                return False
            except (OSError, ValueError):
                return False
        return True

    def close(self) -> None:
        """See `Control.close`."""
        self._ended = True
        self._sock.close()
        # In a forked child the numbers are closed already and may be somebody else's.
        for end in self._quiet or () if os.getpid() == self._pid else ():
            forget(end)
            with contextlib.suppress(OSError):
                os.close(end)
        self._quiet = None


class LocalControl:
    """The control plane of a world of one: nothing ever happens."""

    def fileno(self) -> int:
        """See `Control.fileno`."""
        return -1

    def take(self) -> list[dict[str, Any]]:
        """See `Control.take`."""
        return []

    def post(self, event: dict[str, Any], to: Sequence[int] | None = None) -> bool:
        """See `Control.post`."""
        return True

    def goodbye(self) -> None:
        """See `Control.goodbye`."""

    def close(self) -> None:
        """See `Control.close`."""
