"""Owns the way in for callers' arrays: which reader takes one, what is refused and why, and outputs beside inputs."""

from __future__ import annotations

import sys
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from gfkernels.arrays import dlpack, fast, torch_tensors
from gfkernels.arrays.host import HostArray, Memory, may_self_overlap, raw_view
from gfkernels.errors import UsageError
from gfkernels.types import DTYPES, from_numpy

_SUPPORTED: Final = ", ".join(DTYPES)
_IMMUTABLE: Final = ("jax", "jaxlib", "tensorflow", "pyarrow", "polars", "mlx")
"""Frameworks whose arrays never change; some export them through DLPack without saying so."""
_OVERLAP_WORK: Final = 100_000  # numpy's exact test is exponential at worst; beyond this it counts as overlapping


def inspect(x: Any, *, role: str = "x", writable: bool = True) -> HostArray:
    """Sees an array of any framework as memory.

    Args:
        x: what the caller passed.
        role: how messages call it: "x", "out", "arrays[3]".
        writable: the call will write into it. Strided arrays are then written back by `finish`.

    Raises:
        UsageError: not an array, or one that cannot be reduced correctly; says why and what to pass instead.
    """
    if isinstance(x, np.ndarray):
        return _from_numpy(x, role, writable)
    if torch_tensors.is_tensor(x):
        return torch_tensors.read(x, role, writable)
    _refuse_others(x, role)
    framework = type(x).__module__.partition(".")[0]
    immutable = framework in _IMMUTABLE or _is_jax(x)
    if hasattr(x, "__array_interface__") and not immutable:
        return _from_interface(x, role, writable, framework)
    return _from_dlpack(x, role, writable, framework, immutable)


def overlap_check(x: HostArray, out: HostArray, shape: tuple[int, ...] | None = None) -> bool:
    """Checks an output against its input.

    Args:
        x: the input.
        out: the output, inspected as writable.
        shape: what the output's shape has to be; by default the input's.

    Returns:
        True where both are the same memory: the call works in place, and `out` alone says all of it.

    Raises:
        UsageError: wrong shape or dtype, an immutable output, or one that shares part of the input's memory.
    """
    wanted = x.shape if shape is None else shape
    if out.shape != wanted:
        raise UsageError(f"out has shape {out.shape}, but the result has shape {wanted}")
    if out.dtype is not x.dtype:
        raise UsageError(f"out has dtype {out.dtype.name}, but x has {x.dtype.name}; they must be equal")
    if out.immutable:
        raise UsageError(f"out is an immutable {out.framework} array; leave out= away: the call returns a new array")
    if x.count == 0 or out.count == 0:
        return False
    if x.data == out.data and x.shape == out.shape and _same_strides(x, out):
        return True
    (x_low, x_end), (out_low, out_end) = x.extent(), out.extent()
    if x_end <= out_low or out_end <= x_low or not _share_bytes(x, out):
        return False
    raise UsageError(
        f"out (shape {out.shape}, strides {out.strides} bytes, at {out.data:#x}) shares part of the memory of x (shape "
        f"{x.shape}, strides {x.strides} bytes, at {x.data:#x}); pass the same array or one apart from it"
    )


def empty_like(x: HostArray, shape: tuple[int, ...] | None = None) -> HostArray:
    """A new output of the same framework and dtype (numpy where the framework is not torch or jax); see `result`."""
    wanted = x.shape if shape is None else shape
    if x.framework == "torch":
        return torch_tensors.read(torch_tensors.empty(x, wanted), "out", True)
    array = _from_numpy(np.empty(wanted, x.dtype.numpy), "out", True)
    if x.immutable:
        array.staging, array.immutable, array.framework, array.build = array.original, True, x.framework, None
        array.build = _builder(x.framework, array.staging)
    return array


def _from_numpy(x: npt.NDArray[Any], role: str, writable: bool) -> HostArray:
    if isinstance(x, np.ma.MaskedArray):
        raise UsageError(f"{role} is a masked array, whose masked elements have no value; pass {role}.filled(0)")
    dtype = from_numpy(x.dtype)
    if dtype is None:
        raise _bad_dtype(x.dtype, role)
    if writable and not x.flags.writeable:
        raise UsageError(
            f"{role} is read-only (shape {x.shape}) and the call writes into it; pass a copy ({role}.copy()), or give "
            "out= where the call has it"
        )
    array = HostArray(
        address=0,
        count=x.size,
        dtype=dtype,
        shape=x.shape,
        nbytes=x.nbytes,
        original=x,
        data=fast.data_address(x),
        strides=x.strides,
    )
    flags = x.flags
    if flags.c_contiguous and flags.aligned:  # compiled code wants whole elements at multiples of their size
        array.address = array.data
    else:
        _stage(array, x, role, writable)
    return array


def _stage(array: HostArray, view: npt.NDArray[Any], role: str, writable: bool) -> None:
    if writable and may_self_overlap(view.shape, view.strides, view.itemsize):
        raise UsageError(
            f"{role} has several elements at the same address (shape {view.shape}, strides {view.strides} bytes); pass "
            "a copy, such as numpy.ascontiguousarray of it"
        )
    plain = view.view(np.ndarray)  # a subclass may give indexing another meaning
    staging = np.array(plain, order="C", copy=True)

    def load() -> None:
        staging[...] = plain

    def store() -> None:
        plain[...] = staging

    array.staging, array.load = staging, load
    array.address = staging.__array_interface__["data"][0]
    if writable:
        array.store = store


def _from_interface(x: Any, role: str, writable: bool, framework: str) -> HostArray:
    interface = x.__array_interface__
    if not isinstance(interface, dict) or not isinstance(interface.get("data", ()), tuple):
        raise UsageError(
            f"{role} ({type(x).__name__}) gives a copy of its data, not its memory; pass numpy.array({role})"
        )
    if interface.get("mask") is not None:
        raise UsageError(f"{role} is masked, and masked elements have no value; fill them first")
    try:
        view = np.asarray(x)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{role} ({type(x).__name__}) has a malformed __array_interface__: {error}") from error
    address = interface["data"][0] if interface.get("data") else view.__array_interface__["data"][0]
    if view.size and view.__array_interface__["data"][0] != address:
        # numpy prefers the buffer protocol and __array__; those may be copies.
        raise UsageError(f"{role} ({type(x).__name__}) gives numpy a copy, not its memory; pass numpy.array({role})")
    array = _from_numpy(view, role, writable)
    array.original, array.keep, array.framework = x, view, framework
    return array


def _from_dlpack(x: Any, role: str, writable: bool, framework: str, immutable: bool) -> HostArray:
    described = dlpack.describe(x, role)
    if _is_jax(x):
        framework = "jax"
    elif writable and (immutable or described.read_only):
        raise UsageError(
            f"{role} ({type(x).__name__} of {framework}) is read-only, and the call writes into it; pass a numpy copy"
        )
    memory = Memory(
        described.data, described.shape, described.strides, "u", described.dtype.itemsize, described.read_only
    )
    memory.keep = described.capsule
    # Through unsigned integers of the same size, since a type string cannot name bfloat16.
    view = np.asarray(memory).view(described.dtype.numpy)
    array = _from_numpy(view, role, writable and not immutable)
    array.original, array.keep, array.framework, array.immutable = x, view, framework, immutable
    if immutable and writable:
        if array.staging is None:
            _stage(array, view, role, False)
        array.build = _builder(framework, array.staging)
    return array


def _builder(framework: str, staging: npt.NDArray[Any]) -> Any:
    def build() -> Any:
        return sys.modules["jax"].numpy.array(staging)

    return build


def _same_strides(x: HostArray, out: HostArray) -> bool:
    pairs = zip(x.shape, x.strides, out.strides, strict=True)
    return all(length == 1 or one == other for length, one, other in pairs)


def _share_bytes(x: HostArray, out: HostArray) -> bool:
    try:
        return np.shares_memory(raw_view(x), raw_view(out), max_work=cast(Any, _OVERLAP_WORK))
    except np.exceptions.TooHardError:
        return True


def _is_jax(x: Any) -> bool:
    kind = getattr(sys.modules.get("jax"), "Array", None)
    return isinstance(kind, type) and isinstance(x, kind)


def _refuse_others(x: Any, role: str) -> None:
    if isinstance(x, np.generic):
        raise UsageError(
            f"{role} is a numpy scalar ({type(x).__name__}), which nothing can be written into; pass an array: "
            f"numpy.array({role})"
        )
    kind = type(x).__name__
    core = getattr(sys.modules.get("jax"), "core", None)
    tracer = getattr(core, "Tracer", None)
    if isinstance(tracer, type) and isinstance(x, tracer):
        raise UsageError(f"{role} is a value being traced by jax ({kind}); call gfkernels outside jax.jit")
    device = dlpack.device_of(x, role)
    if hasattr(x, "__cuda_array_interface__") or device in dlpack.CUDA_DEVICES:
        raise UsageError(f"CUDA arrays are not supported in this build: {role} is a {kind}; copy it to the host first")
    if device is not None and device not in dlpack.CPU_DEVICES:
        raise UsageError(f"{role} ({kind}) is on DLPack device type {device}; copy it to the host first")
    if device is None and not hasattr(x, "__array_interface__"):
        hint = "numpy.array of it" if isinstance(x, int | float | complex | list | tuple) else "numpy.asarray of it"
        raise UsageError(
            f"{role} is a {type(x).__module__}.{kind}, not an array (no __array_interface__, __dlpack__ or "
            f"__cuda_array_interface__); pass {hint}"
        )


def _bad_dtype(dtype: np.dtype[Any], role: str) -> UsageError:
    if dtype.names is not None:
        return UsageError(f"{role} has the structured dtype {dtype}; pass its fields one by one: {role}[name]")
    if dtype.kind == "O":
        return UsageError(f"{role} has dtype object, whose elements are Python objects; pass {role}.astype(float)")
    if dtype.kind == "c":
        return UsageError(
            f"{role} has dtype {dtype}; pass its real and imaginary parts as one: {role}.view(float type)"
        )
    if not dtype.isnative:
        return UsageError(
            f"{role} has dtype {dtype.str}, of foreign byte order; pass {role}.astype({role}.dtype.newbyteorder('='))"
        )
    return UsageError(f"{role} has dtype {dtype}, which is not supported; supported: {_SUPPORTED}")
