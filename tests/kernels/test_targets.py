"""Kernels for other CPUs: aarch64 code is emitted and inspected, x86 without F16C is run, and gives equal bits."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import helpers_aarch64 as aarch64
import llvmlite.binding as llvm
import pytest
from kernel_oracle import label, variants
from kernel_process import digests

from gfkernels.kernels import elements, emitter, objects
from gfkernels.types import DTYPES, DType, ReduceOp

Triple = tuple[ReduceOp, DType, "DType | None"]


@pytest.mark.parametrize("variant", variants(), ids=label)
@pytest.mark.slow
def test_aarch64_has_no_x86_and_no_library_calls(variant: Triple) -> None:
    text = emitter.emit(elements.Variant(*variant), aarch64.TRIPLE, native_half=True)
    assert not aarch64.x86_intrinsics(text)
    code = aarch64.assembly(text)
    assert not aarch64.calls(code)
    assert "\tld" in code and "\tst" in code


def test_aarch64_converts_halves_by_instruction() -> None:
    variant = elements.Variant(ReduceOp.SUM, DTYPES["float16"], None)
    code = aarch64.assembly(emitter.emit(variant, aarch64.TRIPLE, native_half=True))
    assert "fcvtl" in code and "fcvtn" in code


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_stores_past_the_caches_are_whole_vectors(dtype: str) -> None:
    """Where an address is not known to be aligned, compilers fall back to ordinary stores, or to scalar ones."""
    variant = elements.Variant(ReduceOp.SUM, DTYPES[dtype], None)
    arm = aarch64.assembly(emitter.emit(variant, aarch64.TRIPLE, native_half=True))
    assert re.search(r"\tstnp\tq", arm)
    if platform.machine() == "x86_64":
        text = emitter.emit(variant, objects.triple(), objects.native_half())
        module = llvm.parse_assembly(text)
        machine = llvm.Target.from_triple(objects.triple()).create_target_machine(cpu="x86-64-v3")
        code = machine.emit_assembly(module)
        assert re.search(r"\tvmovnt\w+\t%ymm", code) and "movnti" not in code


@pytest.mark.parametrize("variant", variants(), ids=label)
@pytest.mark.slow
def test_no_kernel_needs_a_symbol(variant: Triple) -> None:
    """A missing symbol (compiler-rt's fp16 conversions, memcpy) would be a crash when the kernel is loaded or run."""
    name = elements.Variant(*variant).name
    text = emitter.emit(elements.Variant(*variant), objects.triple(), objects.native_half())
    code = objects.compile_object(text)
    declared = {f.name for f in llvm.parse_assembly(text).functions if f.is_declaration}
    assert all(symbol.startswith("llvm.") for symbol in declared)
    for library in (b"memcpy", b"memset", b"memmove", b"__truncsfhf2", b"__extendhfsf2", b"__truncdfhf2", b"__gnu_h2f"):
        assert library not in code, f"{name} calls {library.decode()}"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="an x86-64 without F16C exists on x86-64 only")
def test_a_generic_cpu_gives_the_same_bits(tmp_path: Path, first_process: tuple[Path, dict[str, Any]]) -> None:
    """NUMBA_CPU_NAME=generic: no F16C, no AVX; every kernel runs, and no bit differs from this CPU's kernels."""
    _, here = first_process
    generic = digests(tmp_path / "generic", NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert not generic["native_half"]
    assert generic["results"] == here["results"]
