"""The arithmetic of the host data plane: one compiled function per (op, dtype, wire) that combines spans."""

from __future__ import annotations

from gfkernels.kernels.objects import compile_lock
from gfkernels.kernels.registry import Key, check, combine, is_cached, prepare

__all__ = ["Key", "check", "combine", "compile_lock", "is_cached", "prepare"]
