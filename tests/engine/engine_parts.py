"""Owns what a group of ranks in one process is made of: what is added, guarded memory, and a plan as words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gfkernels import kernels
from gfkernels.engine.context import N_VARIANT_WORDS, Prog, Variant
from gfkernels.plan.model import Plan
from gfkernels.transport import shm
from gfkernels.transport.table import Channels
from gfkernels.types import DTYPES, DType, ReduceOp

Words = npt.NDArray[np.int64]
POISON = 0xA5
_GUARD = 128


@dataclass(frozen=True)
class Numbers:
    """What is added, and how."""

    dtype: DType = DTYPES["float32"]
    op: ReduceOp = ReduceOp.SUM
    wire: DType | None = None

    def kernel(self, packed: bool) -> int:
        """The address of the COMBINE of a plan."""
        key = (self.op, self.dtype, (self.wire or self.dtype) if packed else None)
        kernels.prepare([key])
        return kernels.combine(*key)


class Guarded:
    """Poisoned memory with a guard on both sides; aligned to `align` bytes, and to no more."""

    def __init__(self, nbytes: int, align: int = 64) -> None:
        self._whole: npt.NDArray[np.uint8] = np.full(nbytes + 3 * _GUARD, POISON, np.uint8)
        base = int(self._whole.ctypes.data)
        start = _GUARD + (-(base + _GUARD)) % 64 + (align if align < 64 else 0)
        self._at, self.nbytes, self.address = start, nbytes, base + start

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The memory itself."""
        return self._whole[self._at : self._at + self.nbytes]

    def check(self, name: str) -> None:
        """Fails where somebody wrote beyond the ends."""
        assert (self._whole[: self._at] == POISON).all(), f"somebody wrote before {name}"
        assert (self._whole[self._at + self.nbytes :] == POISON).all(), f"somebody wrote behind {name}"


def shm_ends(size: int, module: Any = shm) -> list[Channels]:
    """The ends of a group that shares memory."""
    memory = [np.zeros(shm.arrivals_nbytes(size) // 8 + 8, np.int64) for _ in range(size)]
    at = [int(m.ctypes.data) + -int(m.ctypes.data) % 64 for m in memory]
    ends: list[Channels] = [module.channels(rank, at) for rank in range(size)]
    for end in ends:
        end.keep.append(memory)
    return ends


@dataclass
class Program:
    """One rank's words for one plan."""

    plan: Plan
    words: Words
    keep: list[Any] = field(default_factory=list)
    addresses: Words = field(default_factory=lambda: np.zeros(1, np.int64))

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)

    def install(self, kind: int, plan: Plan | None = None, *, window_nbytes: int = 0, n_windows: int = 1) -> None:
        """Makes a plan the variant for a memory kind, with STAGE in one of some windows by turns."""
        plan = plan or self.plan
        starts, expects = np.ascontiguousarray(plan.lane_starts), np.ascontiguousarray(plan.expects)
        self.keep += [plan, starts, expects]
        at = int(Prog.VARIANTS) + int(kind) * N_VARIANT_WORDS
        group = self.words[at : at + N_VARIANT_WORDS]
        group[Variant.STEPS], group[Variant.SPANS] = plan.steps.ctypes.data, plan.spans.ctypes.data
        group[Variant.N_LANES], group[Variant.LANE_STARTS] = plan.n_lanes, starts.ctypes.data
        group[Variant.EXPECTS] = expects.ctypes.data if expects.any() else 0
        group[Variant.PRESENT] = 1
        group[Variant.WINDOW_NBYTES], group[Variant.N_WINDOWS] = window_nbytes, n_windows
