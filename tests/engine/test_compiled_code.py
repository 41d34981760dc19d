"""What the compiler made: atomics where they belong, no interpreter on the data path, nothing that is x86's alone."""

from __future__ import annotations

import platform
import re
from types import SimpleNamespace
from typing import Any

import helpers_aarch64 as aarch64
import pytest
from changed_sources import Sources
from compiled_code import (
    ATOMIC_LOAD,
    ATOMIC_STORE,
    EXCHANGE,
    as_for_aarch64,
    assembly_of,
    behind,
    body_of,
    callees,
    functions,
    ir_of,
)
from llvmlite import ir

from gfkernels.engine import entry, executor, rows, staging, waiting
from gfkernels.native import memory
from gfkernels.transport import cma, shm, tcp_table

ENTRY_POINTS = (
    "call", "call_array", "call_arrays", "call_queued", "resume", "acquire", "release", "reenter", "blocked_on",
)  # fmt: skip
TRANSPORTS: dict[str, Any] = {
    **{f"shm.{name}": getattr(shm, name) for name in ("_put", "_poll", "_get")},
    **{f"tcp.{name}": getattr(tcp_table, name) for name in ("put", "poll", "progress", "begin", "flush", "goodbye")},
    **{f"cma.{name}": getattr(cma, name) for name in ("put", "get")},
}
EVERYTHING: dict[str, Any] = {**{name: getattr(executor, name) for name in ENTRY_POINTS}, **TRANSPORTS}

LIBC = {
    "memcpy", "clock_gettime", "sched_yield", "usleep", "poll", "sendmsg", "recvmsg", "process_vm_readv",
    "process_vm_writev", "__errno_location",
}  # fmt: skip
"""All that the data path may call outside itself."""


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYTHING)
def test_every_function(name: str) -> None:
    """One compilation for both looks: each costs seconds."""
    _no_interpreter_on_the_data_path(name)
    _can_be_emitted_for_aarch64(name)


def _no_interpreter_on_the_data_path(name: str) -> None:
    bodies = functions(ir_of(EVERYTHING[name]))
    assert bodies
    for mangled, body in bodies.items():
        foreign = {callee for callee in callees(body) if callee not in bodies and callee not in LIBC}
        assert not foreign, f"{mangled} calls {sorted(foreign)}"


def test_the_look_for_the_interpreter_can_find_it() -> None:
    """numba's wrapper around an entry point is full of what must not be in the function itself."""
    text = ir_of(executor.release)
    assert "@PyArg_UnpackTuple" in text
    wrapper = re.findall(r"^define [^\n]*_ZN7cpython.*?^\}", text, flags=re.MULTILINE | re.DOTALL)[0]
    assert {"PyArg_UnpackTuple", "PyEval_SaveThread"} <= callees(wrapper)


# -- atomics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "loads"),
    [(entry.has_entered, 1), (entry.enter, 1), (waiting.idle, 1), (shm._poll, 1), (executor._admit, 2)],
    ids=["has_entered", "enter", "idle", "shm._poll", "_admit"],
)
def test_loads_that_acquire(function: Any, loads: int) -> None:
    name = function.__name__ if hasattr(function, "py_func") else function.__wrapped__.__name__
    assert len(ATOMIC_LOAD.findall(body_of(function, name))) >= loads


@pytest.mark.parametrize(
    "function",
    [entry._publish, entry.publish_again, executor._finish, executor.release, shm._put],
    ids=["_publish", "publish_again", "_finish", "release", "shm._put"],
)
def test_a_store_that_releases_comes_last(function: Any) -> None:
    """Nothing that it announces is written behind it; only the function's own result is."""
    name = function.__name__ if hasattr(function, "py_func") else function.__wrapped__.__name__
    body = body_of(function, name)
    assert len(ATOMIC_STORE.findall(body)) == 1
    later = re.findall(r"^.*(?:\bstore\b|memcpy|4copy).*$", behind(body, ATOMIC_STORE), flags=re.MULTILINE)
    later = [line for line in later if not re.search(r"ptr %(\.?ret\w*|excinfo)", line)]
    assert later == [], f"written after the release: {later}"


def test_what_comes_before_a_release_is_not_behind_it() -> None:
    """The look itself: a put does copy, only not there."""
    body = body_of(shm._put, "_put")
    assert re.search("memcpy|4copy", body)
    assert ATOMIC_STORE.search(behind(body, re.compile("4copy")))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 orders stores past the caches by a fence")
def test_a_fence_follows_what_goes_past_the_caches() -> None:
    """A release does not order it."""
    code = assembly_of(staging.fill)
    assert re.search(r"\tv?movnt\w+\t", code) and "\tsfence" in code
    # Called, or compiled into its caller.
    assert re.search("(6stream|nontemporal).*(end_streamed|sfence)", body_of(staging.fill, "fill"), flags=re.DOTALL)
    assert re.search("(6stream|nontemporal).*sfence", body_of(rows.step, "work"), flags=re.DOTALL)
    assert "sfence" in body_of(staging.end_streamed, "end_streamed")
    assert re.search("end_streamed|sfence", body_of(rows.step, "_combine"))


def test_the_engine_is_taken_by_one_exchange() -> None:
    assert EXCHANGE.search(body_of(executor._admit, "_admit"))
    assert EXCHANGE.search(body_of(executor.acquire, "acquire"))


@pytest.mark.mutants
@pytest.mark.parametrize(
    ("module", "name", "old", "new", "pattern"),
    [
        ("transport.shm", "_poll", "return load_acquire(", "return load64(", ATOMIC_LOAD),
        ("transport.shm", "_put", "        store_release(", "        store64(", ATOMIC_STORE),
        ("engine.entry", "has_entered", "return 1 if load_acquire(", "return 1 if load64(", ATOMIC_LOAD),
        ("engine.entry", "publish_again", "NBYTES\n    store_release(", "NBYTES\n    store64(", ATOMIC_STORE),
        ("engine.executor", "release", "PHASE, _IDLE_PHASE)\n    store_release(ctx + _LOCK, _NOBODY)\n\n",
         "PHASE, _IDLE_PHASE)\n    store64(ctx + _LOCK, _NOBODY)\n\n", ATOMIC_STORE),
    ],
    ids=["poll", "put", "has_entered", "publish_again", "release"],
)  # fmt: skip
def test_mutants_of_atomics_are_seen(module: str, name: str, old: str, new: str, pattern: re.Pattern[str]) -> None:
    """The same look at sources in which an atomic access became a plain one finds none."""
    full = f"gfkernels.{module}"
    stand_in = {"gfkernels.native.jit": SimpleNamespace(njit=_keep, cfunc=lambda *_, **__: _keep)}
    for changes, expected in (({}, True), ({full: [(old, new)]}, False)):
        function = getattr(Sources([full], changes, stand_in).module(full), name)
        compiled = SimpleNamespace(py_func=function)
        assert bool(pattern.search(body_of(_Hashable(compiled), name))) is expected


class _Hashable:
    def __init__(self, holder: Any) -> None:
        self.py_func = holder.py_func


def _keep(function: Any = None, **options: Any) -> Any:
    """Leaves a function plain, but lets others that are compiled call it."""
    from numba.extending import register_jitable

    return register_jitable(function) if callable(function) else _keep


# -- aarch64 ---------------------------------------------------------------------------------------------------------


def _can_be_emitted_for_aarch64(name: str) -> None:
    text = as_for_aarch64(ir_of(EVERYTHING[name]))
    assert aarch64.x86_intrinsics(text) == []
    made = aarch64.assembly(text)
    loads, stores = len(ATOMIC_LOAD.findall(text)), len(ATOMIC_STORE.findall(text))
    assert len(re.findall(r"\bldap?r\b", made)) >= loads
    assert len(re.findall(r"\bstlr\b", made)) >= stores
    if EXCHANGE.search(text):
        assert re.search(r"\b(casal|ldaxr|__aarch64_cas8_acq_rel)\b", made)
    expected = {"call", "call_array", "call_arrays", "call_queued", "resume", "release", "reenter", "shm._put"}
    assert (stores > 0) == (name in expected)


def test_the_pause_of_a_spin_loop_follows_the_target() -> None:
    signature, codegen = memory.pause._defn(None)
    context = SimpleNamespace(get_dummy_value=lambda: None)
    for triple, hint in ((aarch64.TRIPLE, "llvm.aarch64.hint"), ("x86_64-unknown-linux-gnu", "llvm.x86.sse2.pause")):
        module = ir.Module()
        module.triple = triple
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "f")
        builder = ir.IRBuilder(function.append_basic_block())
        codegen(context, builder, signature, [])
        builder.ret_void()
        assert hint in str(module)
        if triple == aarch64.TRIPLE:
            assert re.search(r"\b(yield|hint\s+#0x1)\b", aarch64.assembly(str(module)))


def test_the_look_for_x86_can_find_it() -> None:
    assert aarch64.x86_intrinsics(ir_of(waiting.idle)) == ["llvm.x86.sse2.pause"]
