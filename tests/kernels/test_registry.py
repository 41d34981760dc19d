"""Which kernels exist, how they are cached on disk, and that one process of a host compiles at a time."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_oracle import Case, cases, label, variants, verify
from kernel_process import digests

from gfkernels import kernels
from gfkernels.errors import UsageError
from gfkernels.kernels import objects, registry
from gfkernels.native import jit
from gfkernels.types import DTYPES, RAW_SOURCES, DType, ReduceOp

F32 = DTYPES["float32"]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a registry that has loaded nothing."""
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(registry, "_addresses", {})
    return tmp_path


@pytest.mark.parametrize(
    ("op", "dtype", "wire", "words"),
    [
        (ReduceOp.MEAN, "int32", None, ["mean", "int32", "sum"]),
        (ReduceOp.MEAN, "bool", None, ["mean", "bool", "max"]),
        (ReduceOp.SUM, "bool", None, ["sum", "bool", "max", "integer"]),
        (ReduceOp.PROD, "bool", None, ["prod", "bool", "min"]),
        (ReduceOp.SUM, "int64", "float16", ["float16", "int64", "wire=None"]),
        (ReduceOp.MAX, "bool", "bfloat16", ["bfloat16", "bool", "wire=None"]),
        (ReduceOp.SUM, "float64", "float32", ["float32", "float16", "bfloat16"]),
    ],
)
def test_what_has_no_meaning_is_refused(op: ReduceOp, dtype: str, wire: str | None, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        kernels.combine(op, DTYPES[dtype], DTYPES[wire] if wire else None)
    for word in words:
        assert word in str(caught.value)


def test_unknown_dtypes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"complex64.*float32"):
        kernels.check(ReduceOp.SUM, DType("complex64", 99, 8, "c"), None)


def test_everything_else_exists() -> None:
    # 4 float dtypes × 5 ops × 3 wires (less a 16-bit float's own), 8 integers × 4 ops, bool × 2.
    assert len(variants()) == 5 * (3 + 3 + 2 + 2) + 8 * 4 + 2


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_the_arrays_own_dtype_as_wire_tells_what_has_travelled(name: str) -> None:
    """A mean scales an array's contribution before it travels, and not again what has travelled."""
    dtype = DTYPES[name]
    travelled, mine, result = (np.array([value], dtype.numpy) for value in (3.0, 8.0, 0.0))
    pointers = np.array([array.ctypes.data for array in (travelled, mine, result)], np.int64)
    counts = np.array([1, 1, 0, 1, RAW_SOURCES], np.int64)
    scale = np.array([0.25, 1.0])
    call = ctypes.CFUNCTYPE(*(ctypes.c_int64,) * 5)(kernels.combine(ReduceOp.MEAN, dtype, dtype))
    assert call(pointers.ctypes.data, counts.ctypes.data, 1, scale.ctypes.data) == 0
    assert float(result[0]) == 3.0 + 8.0 / 4


@pytest.mark.slow
def test_a_second_process_loads_what_the_first_compiled(first_process: tuple[Path, dict[str, Any]]) -> None:
    """All variants, twice: nothing is compiled again, nothing is mixed up."""
    cache, first = first_process
    second = digests(cache)
    assert first["compiled"] == len(first["results"]) == len(variants())
    assert second["compiled"] == 0
    assert second["results"] == first["results"]
    # Results differ between kernels, so that a mix-up would show, but for sum and prod of signed and unsigned
    # integers of one size, which are the same function.
    assert len(set(first["results"].values())) == len(variants()) - 2 * 4
    print(f"cold {first['first_s']:.3f} s, warm {second['first_s']:.3f} s, slowest warm {second['slowest_s']:.4f} s")


@pytest.mark.slow
def test_cached_kernels_are_right(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded from disk computes what was compiled."""
    chosen = [v for v in variants() if v[1].name in ("float32", "int8", "bfloat16")]
    kernels.prepare(chosen)
    monkeypatch.setattr(registry, "_addresses", {})

    def refuse(text: str) -> bytes:
        raise AssertionError("compiled although cached")

    monkeypatch.setattr(objects, "compile_object", refuse)
    for variant in chosen:
        assert kernels.is_cached(*variant)
        address = kernels.combine(*variant)
        for case in cases(variant, (65,), seed=4):
            verify(address, case)


@pytest.mark.parametrize("damage", ["cut", "empty", "flip"])
def test_a_damaged_cache_file_is_compiled_anew(own_cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    kernels.combine(ReduceOp.SUM, F32)
    (path,) = own_cache.glob("*.o")
    content = path.read_bytes()
    if damage == "flip":
        content = content[:400] + bytes([content[400] ^ 1]) + content[401:]
    path.write_bytes({"cut": content[:-100], "empty": b"", "flip": content}[damage])
    assert not objects.read_cached(path.stem)
    monkeypatch.setattr(registry, "_addresses", {})
    case: Case = cases((ReduceOp.SUM, F32, None), (65,))[0]
    verify(kernels.combine(ReduceOp.SUM, F32), case)
    assert objects.read_cached(path.stem)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path / "missing")
    monkeypatch.setattr(registry, "_addresses", {})
    kernels.prepare([(ReduceOp.SUM, F32, None)])
    verify(kernels.combine(ReduceOp.SUM, F32), cases((ReduceOp.SUM, F32, None), (65,))[0])


def test_threads_get_one_kernel(own_cache: Path) -> None:
    """Eight threads ask for the same kernels at once: one compilation each, one address."""
    wanted = [(op, F32, None) for op in ReduceOp]
    found: list[list[int]] = []

    def ask() -> None:
        found.append([kernels.combine(*key) for key in wanted])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(row == found[0] for row in found)


_HOLDER = """
import sys, time
from gfkernels.kernels import compile_lock
with compile_lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_process_holds_the_lock_until_it_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).resolve().parent.parent.parent)
    env = {**os.environ, "GFKERNELS_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        folder = tmp_path / jit.source_hash()
        monkeypatch.setattr(jit, "cache_folder", lambda: folder)
        entered = threading.Event()

        def enter() -> None:
            with kernels.compile_lock():
                entered.set()

        waiter = threading.Thread(target=enter)
        waiter.start()
        time.sleep(0.2)
        assert not entered.is_set(), "two processes held the lock"
        holder.send_signal(signal.SIGKILL)
        assert entered.wait(10), "the lock outlived its holder"
        waiter.join()
    finally:
        holder.kill()
        holder.communicate()


def test_labels_are_distinct() -> None:
    assert len({label(v) for v in variants()}) == len(variants())
