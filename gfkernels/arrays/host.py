"""Owns `HostArray`: an array of some framework as an address, and how a result gets back into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gfkernels.types import DType


def _nothing() -> None:
    return None


@dataclass(eq=False)
class HostArray:
    """Memory that the data plane may read, and write where it was inspected for that.

    Attributes:
        address: of the first of `count` contiguous elements: the array's own, or its temporary's.
        count: elements.
        dtype: their type.
        shape: of the caller's array.
        nbytes: count times item size.
        original: the caller's array, kept alive.
        staging: the contiguous temporary, where the array is strided or immutable; else None.
        framework: "numpy", "torch", "jax" or the name of the array's top-level module.
        immutable: the result is a new array (`result`), since this one can never be written.
        data: address of element (0, …, 0) of the caller's array itself.
        strides: of the caller's array, in bytes.
        keep: what owns the memory besides `original`.
        load: copies the caller's array into `staging`.
        store: makes what was written at `address` visible in the caller's array.
        build: the result as an array of the framework.
    """

    address: int
    count: int
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    original: Any
    staging: Any = None
    framework: str = "numpy"
    immutable: bool = False
    data: int = 0
    strides: tuple[int, ...] = ()
    keep: Any = None
    load: Callable[[], None] = _nothing
    store: Callable[[], None] = _nothing
    build: Callable[[], Any] | None = None

    def refresh(self) -> None:
        """Takes the caller's present values into the temporary; for calls that are planned once and run many times."""
        self.load()

    def finish(self) -> None:
        """After data was written at `address`: writes a temporary back, and tells torch that the tensor changed."""
        self.store()

    def result(self) -> Any:
        """What the call returns: the caller's own array, or, where that is immutable, a new one."""
        return self.original if self.build is None else self.build()

    def extent(self) -> tuple[int, int]:
        """First byte and end of the caller's array itself, gaps between its elements included."""
        if self.count == 0:
            return self.data, self.data
        low = high = self.data
        for length, stride in zip(self.shape, self.strides, strict=True):
            low, high = low + min(0, (length - 1) * stride), high + max(0, (length - 1) * stride)
        return low, high + self.dtype.itemsize


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a C-contiguous array."""
    strides: list[int] = []
    step = itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))


def may_self_overlap(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether two elements may share bytes; exact but for exotic strides, where it says yes."""
    if 0 in shape:
        return False
    end = itemsize
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1:
            if stride < end:
                return True
            end += (length - 1) * stride
    return False


class Memory:
    """Memory that numpy may look at, alive as long as an array over it; `keep` is what owns it."""

    def __init__(
        self, data: int, shape: tuple[int, ...], strides: tuple[int, ...], letter: str, itemsize: int, read_only: bool
    ) -> None:
        self.keep: Any = None
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": f"{'|' if letter == 'V' or itemsize == 1 else np.dtype(np.intp).str[0]}{letter}{itemsize}",
            "data": (data, read_only),
            "strides": strides,
        }


def raw_view(array: HostArray) -> npt.NDArray[Any]:
    """The caller's memory as opaque elements, for numpy's own exact overlap test; never read through."""
    return np.asarray(Memory(array.data, array.shape, array.strides, "V", array.dtype.itemsize, True))
