"""Owns reading torch's CPU tensors through their pointers, under torch's rules for writing; never imports torch."""

from __future__ import annotations

import sys
from typing import Any

from gfkernels.arrays.host import HostArray, may_self_overlap
from gfkernels.errors import UsageError
from gfkernels.types import DTYPES


def is_tensor(x: Any) -> bool:
    """Whether `x` is a torch tensor; only a program that imported torch can have one."""
    torch = sys.modules.get("torch")
    kind = getattr(torch, "Tensor", None)
    return isinstance(kind, type) and isinstance(x, kind)


def read(x: Any, role: str, writable: bool) -> HostArray:
    """The memory of a tensor.

    Raises:
        UsageError: not dense CPU memory, an unsupported dtype, or a tensor that torch itself would not let us write.
    """
    torch: Any = sys.modules["torch"]
    _check_kind(torch, x, role)
    dtype = DTYPES.get(str(x.dtype).removeprefix("torch."))
    if dtype is None:
        raise UsageError(
            f"{role} has dtype {x.dtype}, which is not supported; convert it, with .to, to one of {', '.join(DTYPES)}"
        )
    shape = tuple(int(n) for n in x.shape)
    strides = tuple(int(n) * dtype.itemsize for n in x.stride())
    if writable:
        _check_writable(torch, x, role, shape, strides, dtype.itemsize)
    count = int(x.numel())
    array = HostArray(
        address=0,
        count=count,
        dtype=dtype,
        shape=shape,
        nbytes=count * dtype.itemsize,
        original=x,
        framework="torch",
        data=_pointer(x, role),
        strides=strides,
    )
    if x.is_contiguous() and array.data % dtype.itemsize == 0:
        array.address = array.data
        if writable and count and not x.is_inference():  # inference tensors count no versions
            array.store = lambda: torch.autograd.graph.increment_version(x)
        return array
    with torch.no_grad():
        # detach: a Parameter's temporary is to be a plain tensor.
        array.staging = x.detach().clone(memory_format=torch.contiguous_format)
    array.address = int(array.staging.data_ptr())

    def load() -> None:
        with torch.no_grad():
            array.staging.copy_(x)

    def store() -> None:
        with torch.no_grad():
            x.copy_(array.staging)  # counts a version itself

    array.load = load
    array.store = store if writable else array.store
    return array


def empty(like: HostArray, shape: tuple[int, ...]) -> Any:
    """A new tensor with the dtype of a tensor that was read."""
    torch: Any = sys.modules["torch"]
    return torch.empty(shape, dtype=like.original.dtype)


def _check_kind(torch: Any, x: Any, role: str) -> None:
    if x.layout is not torch.strided:
        raise UsageError(f"{role} is a sparse tensor ({x.layout}); pass {role}.to_dense() or its values")
    if getattr(x, "is_nested", False):
        raise UsageError(f"{role} is a nested tensor; pass its parts, or {role}.to_padded_tensor(...)")
    if x.device.type == "cuda":
        raise UsageError(f"CUDA arrays are not supported in this build: {role} is on {x.device}; pass {role}.cpu()")
    if x.device.type != "cpu":
        raise UsageError(f"{role} is on device {x.device}, whose memory cannot be reached from here; pass {role}.cpu()")
    if x.is_neg() or x.is_conj():
        raise UsageError(f"{role} is a lazily negated or conjugated view; pass {role}.resolve_neg().resolve_conj()")


def _check_writable(
    torch: Any, x: Any, role: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"{role} requires grad, and autograd would not see that it is written in place; pass {role}.detach(), or "
            "call within torch.no_grad()"
        )
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise UsageError(
            f"{role} is an inference tensor, which torch lets nobody write outside torch.inference_mode(); call within "
            f"it, or pass {role}.clone()"
        )
    if may_self_overlap(shape, strides, itemsize):
        raise UsageError(
            f"{role} has several elements at the same address (shape {shape}, strides {tuple(x.stride())}); pass "
            f"{role}.contiguous()"
        )


def _pointer(x: Any, role: str) -> int:
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    try:
        if isinstance(x, fake):  # asked for its pointer, it warns and says 0
            raise RuntimeError("it is fake, made while torch traces a program")
        address = int(x.data_ptr())
    except RuntimeError as error:  # functorch's wrappers have no storage either
        raise UsageError(f"{role} ({type(x).__name__}) has no memory of its own: {error}") from error
    if address == 0 and x.numel():
        raise UsageError(
            f"{role} ({type(x).__name__}) has no memory of its own; pass a plain tensor, such as .to_local() of a "
            "distributed one"
        )
    return address
