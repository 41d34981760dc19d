"""Owns having the engine's entry points compiled before a call's deadline runs, once per host and not once per rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from numba import types

from gfkernels.engine import executor
from gfkernels.native import jit
from gfkernels.trace import log

_ENTRY_POINTS = (
    (executor.call, 4),
    (executor.call_array, 3),
    (executor.call_arrays, 4),
    (executor.call_queued, 4),
    (executor.resume, 1),
    (executor.acquire, 2),
    (executor.release, 1),
    (executor.reenter, 1),
    (executor.blocked_on, 2),
)


def prepare(lock: Callable[[], AbstractContextManager[None]], name: str, load: Callable[[], None]) -> None:
    """Compiles or loads what every call needs.

    Args:
        lock: held while this process compiles for the whole host.
        name: of the transports that `load` imports; remembered in the cache folder once they are compiled.
        load: imports the transports, whose functions compile as they are imported.
    """
    marker = jit.cache_folder() / f"{name}.ready"
    if marker.exists():
        _compile(load)
        return
    log.info("compiling the data plane for this machine, once; kept in %s", marker.parent)
    with lock():
        _compile(load)
        with contextlib.suppress(OSError):
            marker.touch()


def _compile(load: Callable[[], None]) -> None:
    load()
    for function, n_args in _ENTRY_POINTS:
        function.compile((types.int64,) * n_args)
