"""Owns what a forked child must not keep open: registered descriptors and objects are closed right after the fork.

A child that inherits a rank's control connection would keep it open after the rank dies, and nobody would notice the
death. Closing says nothing to the other side: the parent's connection goes on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any, Protocol, TypeVar, overload


class Closable(Protocol):
    """Anything with `close()`: a socket, a selector, a file."""

    def close(self) -> Any:
        """Gives the descriptor back."""


C = TypeVar("C", bound=Closable)

_objects: weakref.WeakSet[Any] = weakref.WeakSet()
_descriptors: set[int] = set()
_lock = threading.Lock()


@overload
def close_in_child(item: int) -> int: ...
@overload
def close_in_child(item: C) -> C: ...
def close_in_child(item: Any) -> Any:
    """Registers a descriptor, or an object with `close()` (held weakly), to be closed in forked children.

    A bare descriptor must be taken back with `forget` before it is closed, since its number will be used again.

    Returns:
        `item`, so that a call can wrap the expression which opens it.
    """
    with _lock:
        if isinstance(item, int):
            _descriptors.add(item)
        else:
            _objects.add(item)
    return item


def forget(item: int | Closable) -> None:
    """Takes a registration back; unknown items are ignored."""
    with _lock:
        if isinstance(item, int):
            _descriptors.discard(item)
        else:
            _objects.discard(item)


def _close_all() -> None:
    global _lock
    # Another thread may have held the lock at the moment of the fork; that thread does not exist here.
    _lock = threading.Lock()
    for item in list(_objects):
        with contextlib.suppress(Exception):
            item.close()
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _objects.clear()
    _descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
