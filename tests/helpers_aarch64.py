"""Owns how tests compile LLVM IR for aarch64 and look at what came out, on whatever machine they run."""

from __future__ import annotations

import re

import llvmlite.binding as llvm

TRIPLE = "aarch64-unknown-linux-gnu"


def assembly(text: str) -> str:
    """aarch64 assembly of LLVM IR (kernels' own, or `inspect_llvm()` of a numba function).

    Args:
        text: LLVM IR. Its triple, data layout and target attributes are replaced, so IR that numba made for this
            machine will do, as long as no target-specific intrinsic is in it.
    """
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    text = re.sub(r'^target (triple|datalayout) = ".*"$', "", text, flags=re.MULTILINE)
    text = re.sub(r'"(target-cpu|target-features|tune-cpu)"="[^"]*"', "", text)
    module = llvm.parse_assembly(f'target triple = "{TRIPLE}"\n{text}')
    module.verify()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu="generic", opt=2)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return str(machine.emit_assembly(module))


def x86_intrinsics(text: str) -> list[str]:
    """The x86-only intrinsics that LLVM IR names."""
    return sorted(set(re.findall(r"llvm\.x86\.[\w.]+", text)))


def calls(assembly_text: str) -> list[str]:
    """What aarch64 assembly calls by name: library functions that must exist at run time."""
    return sorted(set(re.findall(r"^\s+bl?\s+([A-Za-z_]\w*)\s*$", assembly_text, flags=re.MULTILINE)))
