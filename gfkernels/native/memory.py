"""Owns raw memory from compiled code: atomic words, pauses, loads and stores by address, calls through a pointer."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_I64 = ir.IntType(64)
_POINTER_ARGS = 8


def _pointer(builder: Any, address: Any, to: Any) -> Any:
    return builder.inttoptr(address, to.as_pointer())


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """The int64 at `address`; later reads see what was written before its matching `store_release`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0], _I64), "acquire", 8, typ=_I64)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Writes an int64 after all earlier reads and writes of this thread."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0], _I64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def exchange(typingctx: Any, address: Any, value: Any) -> Any:
    """Atomically puts `value` at `address` and returns what was there (acquire and release)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", _pointer(builder, args[0], _I64), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def compare_exchange(typingctx: Any, address: Any, expected: Any, desired: Any) -> Any:
    """Atomically replaces `expected` by `desired`; returns what was there before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], _I64)
        pair = builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def load64(typingctx: Any, address: Any) -> Any:
    """The int64 at `address`, an ordinary read."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], _I64), typ=_I64)

    return types.int64(types.int64), codegen


@intrinsic
def store64(typingctx: Any, address: Any, value: Any) -> Any:
    """Writes an int64, an ordinary write."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], _I64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load32(typingctx: Any, address: Any) -> Any:
    """The int32 at `address`, sign-extended."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        return builder.sext(builder.load(_pointer(builder, args[0], i32), typ=i32), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def store32(typingctx: Any, address: Any, value: Any) -> Any:
    """Writes the low 32 bits of `value`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        builder.store(builder.trunc(args[1], i32), _pointer(builder, args[0], i32))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


BLOCK_NBYTES = 128
_VECTOR = ir.VectorType(ir.IntType(8), 32)


@intrinsic
def copy_block(typingctx: Any, dst: Any, src: Any) -> Any:
    """Copies 128 bytes between any addresses, all of them read before any is written."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _VECTOR.count
        places = [ir.Constant(_I64, at) for at in range(0, BLOCK_NBYTES, step)]
        values = [
            builder.load(_pointer(builder, builder.add(args[1], at), _VECTOR), align=1, typ=_VECTOR) for at in places
        ]
        for at, value in zip(places, values, strict=True):
            builder.store(value, _pointer(builder, builder.add(args[0], at), _VECTOR), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


LINE_NBYTES = 64


@intrinsic
def stream_block(typingctx: Any, dst: Any, src: Any) -> Any:
    """As `copy_block` to a `dst` at the begin of a cache line, past the caches: see `drain_streams`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(8), LINE_NBYTES)
        places = [ir.Constant(_I64, at) for at in range(0, BLOCK_NBYTES, LINE_NBYTES)]
        values = [builder.load(_pointer(builder, builder.add(args[1], at), line), align=1, typ=line) for at in places]
        for at, value in zip(places, values, strict=True):
            store = builder.store(value, _pointer(builder, builder.add(args[0], at), line), align=LINE_NBYTES)
            past_the_caches(builder.module, store)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def past_the_caches(module: Any, store: Any) -> None:
    """Marks an LLVM store as one of bytes that this core will not need soon."""
    store.set_metadata("nontemporal", module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


def _machine(triple: str) -> str:
    # The target's own triple decides, so that code emitted for another architecture holds its instructions.
    for machine, prefixes in (("aarch64", ("aarch64", "arm64")), ("x86_64", ("x86_64",))):
        if triple.startswith(prefixes):
            return machine
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


@intrinsic
def drain_streams(typingctx: Any) -> Any:
    """Later writes of this thread become visible after all that it has streamed.

    x86 orders stores past the caches by a fence only; elsewhere `store_release` orders them like any other.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _machine(builder.module.triple or "") == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse.sfence", (), kind), [])
        return context.get_dummy_value()

    return types.void(), codegen


_PAUSE = {
    "x86_64": ("llvm.x86.sse2.pause", (), ()),
    "aarch64": ("llvm.aarch64.hint", (ir.IntType(32),), (1,)),
}


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tells the core that this is a spin loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        machine = _machine(builder.module.triple or "")
        if machine in _PAUSE:
            name, kinds, values = _PAUSE[machine]
            function = builder.module.declare_intrinsic(name, (), ir.FunctionType(ir.VoidType(), list(kinds)))
            builder.call(function, [ir.Constant(kind, value) for kind, value in zip(kinds, values, strict=True)])
        return context.get_dummy_value()

    return types.void(), codegen


def _make_call(n_args: int) -> Any:
    signature_ = types.int64(*(types.int64,) * (n_args + 1))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(_I64, [_I64] * n_args)
        return builder.call(builder.inttoptr(args[0], function_type.as_pointer()), list(args[1:]))

    return signature_, codegen


@intrinsic
def call1(typingctx: Any, function: Any, a: Any) -> Any:
    """Calls `int64 f(int64)` at an address."""
    return _make_call(1)


@intrinsic
def call3(typingctx: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """Calls `int64 f(int64 × 3)` at an address."""
    return _make_call(3)


@intrinsic
def call4(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Calls `int64 f(int64 × 4)` at an address."""
    return _make_call(4)


@intrinsic
def call5(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """Calls `int64 f(int64 × 5)` at an address."""
    return _make_call(5)


@intrinsic
def call8(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """Calls `int64 f(int64 × 8)` at an address."""
    return _make_call(8)
