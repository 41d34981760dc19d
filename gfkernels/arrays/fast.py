"""Owns where CPython's numpy keeps an array's fields, for code that reads them by address, and the proof that it does.

The layout of `PyArrayObject` is part of numpy's ABI, but the object header before it is not the same in every build of
Python (free-threaded and tracing builds have longer ones), so compiled code may use it only where `layout_ok`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, Final

import numpy as np

DATA: Final = 16
NDIM: Final = 24  # int32
DIMENSIONS: Final = 32
STRIDES: Final = 40
BASE: Final = 48
DESCR: Final = 56
FLAGS: Final = 64  # int32

C_CONTIGUOUS: Final = 0x0001
ALIGNED: Final = 0x0100
WRITEABLE: Final = 0x0400


@functools.cache
def layout_ok() -> bool:
    """Whether the fields of a `numpy.ndarray` lie at the offsets above in this process; checked on real arrays."""
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    if np.ndarray.__basicsize__ < FLAGS + 4 or object.__basicsize__ != DATA:
        return False
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    read_only = whole[1]
    read_only.flags.writeable = False
    samples = [whole, whole[:, ::2].T, read_only, np.zeros(()), np.zeros((0, 5), np.int8), np.asfortranarray(whole[0])]
    return all(_matches(sample) for sample in samples)


def data_address(array: np.ndarray[Any, Any]) -> int:
    """Address of element (0, …, 0); several times faster than asking numpy where `layout_ok`."""
    if layout_ok():
        return _word(array, DATA)
    return int(array.__array_interface__["data"][0])


def _matches(array: np.ndarray[Any, Any]) -> bool:
    ndim = _int32(array, NDIM)
    if ndim != array.ndim or _word(array, DATA) != array.__array_interface__["data"][0]:
        return False
    if _word(array, DESCR) != id(array.dtype) or (array.base is not None and _word(array, BASE) != id(array.base)):
        return False
    flags, expected = _int32(array, FLAGS), array.flags
    for bit, value in (
        (C_CONTIGUOUS, expected.c_contiguous),
        (ALIGNED, expected.aligned),
        (WRITEABLE, expected.writeable),
    ):
        if bool(flags & bit) != value:
            return False
    if ndim == 0:
        return True
    dimensions = (ctypes.c_int64 * ndim).from_address(_word(array, DIMENSIONS))
    strides = (ctypes.c_int64 * ndim).from_address(_word(array, STRIDES))
    return tuple(dimensions) == array.shape and tuple(strides) == array.strides


def _word(array: object, offset: int) -> int:
    return ctypes.c_int64.from_address(id(array) + offset).value


def _int32(array: object, offset: int) -> int:
    return ctypes.c_int32.from_address(id(array) + offset).value
