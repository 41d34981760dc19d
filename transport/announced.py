"""Owns which memory of this process is worth registering with a network card, and tells the cards' owners of it.

An arena says what it hands out, `gfkernels.register` what users name; an open device listens. Whoever comes later is
told of all that is there.
"""

from __future__ import annotations

import itertools
import threading
from typing import Final, Protocol


class Listener(Protocol):
    """Somebody who registers memory. It may be called from any thread, also while garbage is collected."""

    def announced(self, key: int, address: int, nbytes: int) -> None:
        """These bytes will stay where they are until `withdrawn(key)`."""

    def withdrawn(self, key: int) -> None:
        """The memory is about to go."""


class Announced:
    """Spans of memory by key, and who wants to know."""

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may return an arena's block while this very thread holds it.
        self._lock = threading.RLock()
        self._keys = itertools.count()
        self._spans: dict[int, tuple[int, int]] = {}
        self._listeners: list[Listener] = []

    def add(self, address: int, nbytes: int) -> int:
        """Announces memory; the key for `remove`."""
        with self._lock:
            key = next(self._keys)
            self._spans[key] = (address, nbytes)
            for listener in tuple(self._listeners):
                listener.announced(key, address, nbytes)
            return key

    def remove(self, key: int) -> None:
        """Takes it back, before the memory is gone; does nothing the second time."""
        with self._lock:
            if self._spans.pop(key, None) is not None:
                for listener in tuple(self._listeners):
                    listener.withdrawn(key)

    def listen(self, listener: Listener) -> None:
        """From now on the listener hears of everything, and at once of what is there."""
        with self._lock:
            self._listeners.append(listener)
            for key, (address, nbytes) in list(self._spans.items()):
                listener.announced(key, address, nbytes)

    def ignore(self, listener: Listener) -> None:
        """The listener hears no more."""
        with self._lock:
            self._listeners = [one for one in self._listeners if one is not listener]


announced: Final = Announced()
"""This process's."""
