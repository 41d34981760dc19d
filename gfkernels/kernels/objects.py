"""Owns the way from IR text to a callable address: optimise, emit an object file, keep it on disk, load it.

Kernels are whole functions written as LLVM IR, so they go to LLVM directly, without a Python function for numba to type
and with a file of our own in the cache folder: one object file a variant, its hash in front of it. The folder's name
already holds the hash of all our sources, of numba's and llvmlite's versions and of the CPU that code is emitted for.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import llvmlite.binding as llvm

from gfkernels.native import jit

try:
    import fcntl
except ImportError:  # Windows, where ranks share no host
    fcntl = None  # type: ignore[assignment]

_DIGEST_BYTES: Final = 32
_engines: list[Any] = []
"""The loaded code: an address lives as long as its engine."""


@functools.cache
def _initialize() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def triple() -> str:
    """The triple of this process, which numba compiles for too."""
    return str(llvm.get_process_triple())


@functools.cache
def native_half() -> bool:
    """Whether numba's target (not merely this CPU) converts fp16 by instructions."""
    return platform.machine() in ("aarch64", "arm64") or jit.target_has("f16c")


def _target_machine() -> Any:
    _initialize()
    cpu, features = jit.target_cpu()
    target = llvm.Target.from_triple(triple())
    return target.create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )


def optimise(text: str, machine: Any) -> Any:
    """The verified and optimised module of IR text.

    Args:
        text: LLVM IR.
        machine: the llvmlite target machine whose costs the passes ask.
    """
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    # The loops are vectors already; another round of it would only multiply the code.
    options.loop_vectorization = options.slp_vectorization = False
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def compile_object(text: str) -> bytes:
    """The object file of IR text for numba's target."""
    machine = _target_machine()
    return bytes(machine.emit_object(optimise(text, machine)))


def load_object(code: bytes, name: str) -> int:
    """Makes an object file executable in this process and returns the address of its function `name`."""
    machine = _target_machine()
    empty = llvm.parse_assembly(f'target triple = "{triple()}"')
    engine = llvm.create_mcjit_compiler(empty, machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address(name))


def _path(name: str) -> Path:
    return jit.cache_folder() / f"{name}.o"


def read_cached(name: str) -> bytes | None:
    """The object file kept under `name`, or None where there is none or a damaged one."""
    try:
        content = _path(name).read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def write_cached(name: str, code: bytes) -> None:
    """Keeps an object file under `name`; a folder that cannot be written only costs a compilation next time."""
    path = _path(name)
    with suppress(OSError):
        handle, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            # Another process may be reading: it sees the old file or the new one, never half of one.
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


@contextmanager
def compile_lock() -> Iterator[None]:
    """Held by the one process of this host (and cache folder) that compiles; others wait, then find its results.

    The kernel drops the lock when its holder dies. Not re-entrant. Where the file cannot be locked (a folder without
    write permission, a filesystem without locks), every process compiles for itself.
    """
    handle = None
    if fcntl is not None:
        try:
            handle = os.open(jit.cache_folder() / "compile.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            if handle is not None:
                os.close(handle)
                handle = None
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
