"""Owns how gfkernels compiles: `njit` and `cfunc` with a cache folder of our own that cannot go stale.

numba's cache looks only at the decorated function's own file and never at changed globals or callees elsewhere, so
the folder's name is a hash over all sources that end up in machine code, numba's and llvmlite's versions, and the CPU
that numba targets. The folder is private to the user because numba's cache files are pickles.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
from numba.core import config as numba_config
from numba.core.registry import cpu_target

from gfkernels.errors import ConfigError, UnavailableError

F = TypeVar("F", bound=Callable[..., Any])

_COMPILED_FOLDERS = ("native", "kernels", "engine", "transport")

if numba_config.DISABLE_JIT:
    raise UnavailableError(
        "NUMBA_DISABLE_JIT is set, and gfkernels moves data in functions that exist only compiled",
        "Unset NUMBA_DISABLE_JIT in this process",
    )


def target_cpu() -> tuple[str, str]:
    """The CPU name and feature string that numba compiles for (not necessarily the CPU we run on)."""
    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    return str(name), str(features)


@functools.cache
def target_has(feature: str) -> bool:
    """Whether code for numba's target may use an instruction set such as "f16c" or "avx512f"."""
    return f"+{feature}" in target_cpu()[1].split(",")


def _sources() -> list[Path]:
    package = Path(__file__).resolve().parent.parent
    files = [package / "types.py"]
    for folder in _COMPILED_FOLDERS:
        files += sorted((package / folder).resolve().rglob("*.py"))
    return files


@functools.cache
def source_hash() -> str:
    """Hash of every source that is compiled, and of what compiles it."""
    digest = hashlib.sha256()
    for item in (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag or "", *target_cpu()):
        digest.update(item.encode() + b"\0")
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


@functools.cache
def cache_folder() -> Path:
    """The folder of our compiled code: `$GFKERNELS_CACHE_DIR` or `~/.cache/gfkernels`, mode 0700, ours alone.

    Raises:
        ConfigError: the folder belongs to another user or others may write into it.
    """
    home = os.environ.get("GFKERNELS_CACHE_DIR")
    if not home:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        home = os.path.join(base, "gfkernels")
    folder = Path(home) / source_hash()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (Path(home), folder):
        info = path.stat()
        if hasattr(os, "getuid") and info.st_uid != os.getuid():
            raise ConfigError(
                f"the compile cache {path} belongs to user {info.st_uid}, not to {os.getuid()}: code in it would run "
                "as you. Remove it, or set GFKERNELS_CACHE_DIR to a folder of your own"
            )
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            path.chmod(0o700)
    return folder


def _decorated(decorate: Callable[[], Any]) -> Any:
    # numba reads CACHE_DIR while it decorates; the user's own functions must keep their own setting.
    saved = numba_config.CACHE_DIR
    numba_config.CACHE_DIR = str(cache_folder())
    try:
        return decorate()
    finally:
        numba_config.CACHE_DIR = saved


def njit(*args: Any, **options: Any) -> Any:
    """`numba.njit(nogil=True, cache=True)` into our cache folder; usable bare or with signatures.

    Pass `cache=False` for functions built by a factory: numba keys its cache by file and line, and would mix them up.
    """
    options.setdefault("nogil", True)
    options.setdefault("cache", True)
    if len(args) == 1 and callable(args[0]) and not options.get("signature") and not _is_signature(args[0]):
        return _decorated(lambda: numba.njit(**options)(args[0]))

    def wrap(function: F) -> F:
        return cast(F, _decorated(lambda: numba.njit(*args, **options)(function)))

    return wrap


def cfunc(signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.cfunc(signature, nogil, cache=True)` into our cache folder; `.address` is what tables hold."""
    options.setdefault("cache", True)
    options.setdefault("nopython", True)

    def wrap(function: Callable[..., Any]) -> Any:
        return _decorated(lambda: numba.cfunc(signature, **options)(function))

    return wrap


def _is_signature(value: Any) -> bool:
    return isinstance(value, numba.core.typing.templates.Signature)
