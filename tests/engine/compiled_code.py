"""Owns looking into compiled functions: their LLVM IR made anew, cut into functions, and what each of them calls."""

from __future__ import annotations

import functools
import re
from typing import Any

import numba
from numba import types

ATOMIC_LOAD = re.compile(r"load atomic i64, ptr %\S+ acquire, align 8")
ATOMIC_STORE = re.compile(r"store atomic i64 \S+, ptr %\S+ release, align 8")
EXCHANGE = re.compile(r"cmpxchg ptr %\S+, i64 \S+, i64 \S+ acq_rel acquire")
_WRAPPERS = ("_ZN7cpython", "cfunc.")
"""What numba puts around a function so that the interpreter, or C, can call it."""


@functools.cache
def ir_of(function: Any) -> str:
    """The optimised LLVM IR of a compiled function of int64s, callees included; cached code cannot be looked into."""
    plain = getattr(function, "py_func", None)
    if plain is not None:
        fresh = numba.njit(nogil=True)(plain)
        fresh.compile((types.int64,) * plain.__code__.co_argcount)
        return "".join(fresh.inspect_llvm().values())
    plain = function.__wrapped__
    return str(numba.cfunc(types.int64(*(types.int64,) * plain.__code__.co_argcount))(plain).inspect_llvm())


def assembly_of(function: Any) -> str:
    """The machine code of a compiled function of int64s, callees included."""
    fresh = numba.njit(nogil=True)(function.py_func)
    fresh.compile((types.int64,) * function.py_func.__code__.co_argcount)
    return "".join(fresh.inspect_asm().values())


def functions(ir: str) -> dict[str, str]:
    """The bodies of the functions that IR defines, by mangled name; without numba's wrappers of `njit` functions."""
    found = re.findall(r"^define [^@]*@\"?([\w.$]+)\"?\(.*?\{\n(.*?)^\}", ir, flags=re.MULTILINE | re.DOTALL)
    return {name: body for name, body in found if not name.startswith(_WRAPPERS)}


def body_of(function: Any, name: str) -> str:
    """The body of a function of ours, found by its plain name in the mangled one."""
    bodies = [body for mangled, body in functions(ir_of(function)).items() if f"{len(name)}{name}" in mangled]
    assert len(bodies) == 1, f"{len(bodies)} functions called {name} in {sorted(functions(ir_of(function)))}"
    return bodies[0]


def callees(body: str) -> set[str]:
    """What a body calls by name, without LLVM's intrinsics."""
    return {
        name for name in re.findall(r"(?:call|invoke) [^@\n]*@\"?([\w.$]+)\"?\(", body) if not name.startswith("llvm.")
    }


def as_for_aarch64(ir: str) -> str:
    """IR with the spin loop's hint, and without the fence, as `gfkernels.native.memory` writes it for aarch64."""
    ir = re.sub(r"(declare|tail call|call) void @llvm\.x86\.sse\.sfence\(\).*", "", ir)
    ir = re.sub(r"declare void @llvm\.x86\.sse2\.pause\(\).*", "declare void @llvm.aarch64.hint(i32)", ir)
    return ir.replace("@llvm.x86.sse2.pause()", "@llvm.aarch64.hint(i32 1)")


def behind(body: str, pattern: re.Pattern[str]) -> str:
    """All code that can still run after the one place in a body that matches."""
    parts = re.findall(r"^([\w.$-]+):.*?\n(.*?)(?=^[\w.$-]+:|\Z)", "entry0:\n" + body, flags=re.MULTILINE | re.DOTALL)
    blocks = dict(parts)
    labels = [label for label, text in parts if pattern.search(text)]
    assert len(labels) == 1, f"{len(labels)} blocks match {pattern.pattern}"
    place = pattern.search(blocks[labels[0]])
    assert place is not None
    rest = blocks[labels[0]][place.end() :]
    reached: set[str] = set()
    left = re.findall(r"label %\"?([\w.$-]+)\"?", rest)
    while left:
        label = left.pop()
        if label not in reached:
            reached.add(label)
            left += re.findall(r"label %\"?([\w.$-]+)\"?", blocks[label])
    return str(rest) + "".join(blocks[label] for label in reached)
