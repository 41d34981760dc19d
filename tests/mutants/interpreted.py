"""Owns the engine's sources run by the interpreter, with a change: a mutant costs no compilation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from changed_sources import Changes, Sources, uncompiled

_LIBC = ctypes.CDLL(None, use_errno=True)


def _word(address: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address)


def _load(address: int) -> int:
    return int(_word(address).value)


def _store(address: int, value: int) -> None:
    _word(address).value = int(value)


def _load32(address: int) -> int:
    return int(ctypes.c_int32.from_address(address).value)


def _compare_exchange(address: int, expected: int, desired: int) -> int:
    found = _load(address)
    if found == expected:
        _store(address, desired)
    return found


def _caller(n_args: int) -> Callable[..., int]:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_int64,) * n_args)
    return lambda function, *arguments: int(prototype(int(function))(*map(int, arguments)))


def _now_ns(timespec: int) -> int:
    _LIBC.clock_gettime(1, ctypes.c_void_p(timespec))
    return _load(timespec) * 1_000_000_000 + _load(timespec + 8)


def _copy(dst: int, src: int, nbytes: int) -> None:
    ctypes.memmove(int(dst), int(src), int(nbytes))


_MEMORY = SimpleNamespace(
    load64=_load, load_acquire=_load, store64=_store, store_release=_store, load32=_load32,
    compare_exchange=_compare_exchange, pause=lambda: None, drain_streams=lambda: None, LINE_NBYTES=64,
    call1=_caller(1), call3=_caller(3), call4=_caller(4), call5=_caller(5), call8=_caller(8),
)  # fmt: skip
_NATIVE = SimpleNamespace(
    now_ns=_now_ns, copy=_copy, stream=_copy, sched_yield=lambda: 0, usleep=lambda _: 0,
    poll=lambda fds, n, timeout: int(_LIBC.poll(ctypes.c_void_p(int(fds)), int(n), int(timeout))),
)  # fmt: skip
_STAND_INS = {
    "gfkernels.native.jit": SimpleNamespace(njit=uncompiled),
    "gfkernels.native.memory": _MEMORY,
    "gfkernels.native.libc": _NATIVE,
}
_ENGINE = [f"gfkernels.engine.{name}" for name in ("staging", "rows", "entry", "waiting", "executor")]


def engine(changes: Changes | None = None) -> Any:
    """The engine's entry points, interpreted; `changes` by module name."""
    return Sources(_ENGINE, changes, _STAND_INS).module("gfkernels.engine.executor")


def changed(module: str, changes: Sequence[tuple[str, str]]) -> Any:
    """A private copy of another module, with changes."""
    return Sources([module], {module: changes}).module(module)
