"""Owns reading DLPack capsules of CPU memory, including bfloat16, which numpy's own reader does not know."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final

from gfkernels.arrays.host import contiguous_strides
from gfkernels.errors import UsageError
from gfkernels.types import DTYPES, DType

CPU_DEVICES: Final = (1, 3, 11)  # plain, and pinned by CUDA or ROCm: addresses that the CPU may use
CUDA_DEVICES: Final = (2, 13)
_READ_ONLY: Final = 1
_FLOAT, _BFLOAT, _BOOL = 2, 4, 6
_LETTERS: Final = {0: "int", 1: "uint", _FLOAT: "float"}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True)
class Described:
    """What a capsule says. The memory lives as long as `capsule`, which is never consumed and so frees it itself."""

    capsule: Any
    data: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    read_only: bool


def device_of(x: Any, role: str) -> int | None:
    """The DLPack device type of an array, None for one that has no DLPack.

    Raises:
        UsageError: it lies on several devices, or cannot say.
    """
    if not (hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")):
        return None
    try:
        return int(x.__dlpack_device__()[0])
    except (BufferError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{role} ({type(x).__name__}) is not on one device: {error}; pass a local part") from error


def describe(x: Any, role: str) -> Described:
    """The memory behind `x.__dlpack__()`; strides in bytes.

    Raises:
        UsageError: another device than the CPU, or a dtype that is not supported.
    """
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before DLPack 1.0
        capsule = x.__dlpack__()
    except (BufferError, RuntimeError, ValueError) as error:
        raise UsageError(f"{role} ({type(x).__name__}) does not give out its memory: {error}") from error
    read_only = False
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise UsageError(f"{role} speaks DLPack {versioned.major}.{versioned.minor}; this build reads 0.x and 1.x")
        tensor, read_only = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    elif _is_valid(capsule, b"dltensor"):
        tensor = _Managed.from_address(_get_pointer(capsule, b"dltensor")).tensor
    else:
        raise UsageError(f"{role} ({type(x).__name__}): __dlpack__ gave no DLPack capsule but {type(capsule).__name__}")
    dtype = _dtype(tensor, role)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = contiguous_strides(shape, dtype.itemsize)
    if tensor.strides:
        strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim))
    return Described(capsule, (tensor.data or 0) + tensor.byte_offset, dtype, shape, strides, read_only)


def _dtype(tensor: _Tensor, role: str) -> DType:
    name = f"{_LETTERS[tensor.code]}{tensor.bits}" if tensor.code in _LETTERS else ""
    if tensor.code == _BFLOAT and tensor.bits == 16:
        name = "bfloat16"
    if tensor.code == _BOOL and tensor.bits == 8:
        name = "bool"
    if name not in DTYPES or tensor.lanes != 1:
        raise UsageError(
            f"{role} has DLPack dtype (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes), which is not "
            f"supported; convert it to one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]
