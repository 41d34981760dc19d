"""Owns the ways for a card to reach GPU memory: dma-buf, then peermem; and the reasons why neither works.

With dma-buf the driver of the GPU exports a span of its memory as a file descriptor, which the kernel hands to the
card: nothing else is needed. Peermem is a kernel module of the GPU's vendor, with which GPU addresses are registered
like any others.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any, Final

from gfkernels.errors import UnavailableError
from gfkernels.transport.verbs.compat import error_code
from gfkernels.transport.verbs.device import Device, Registration

_DMA_BUF_SUPPORTED: Final = 124  # CUdevice_attribute
_RANGE_HANDLE_DMA_BUF: Final = 1  # CUmemRangeHandleType
_MODULES: Final = ("nvidia_peermem", "nv_peer_mem")
_NO_MEMORY_FD: Final = -1


def probe_gpu_memory(device: Device, *, root: Path = Path("/sys")) -> tuple[bool, str]:
    """Whether this card can reach GPU memory: (ok, by which way; or why by none, with what would help).

    Args:
        device: the card.
        root: where sysfs is mounted.
    """
    no_dmabuf = _probe_dmabuf(device)
    if no_dmabuf is None:
        return True, "dma-buf"
    no_peermem = _probe_peermem(root)
    if no_peermem is None:
        return True, f"peermem (dma-buf: {no_dmabuf})"
    return False, f"dma-buf: {no_dmabuf}; peermem: {no_peermem}"


def register_gpu_memory(device: Device, address: int, nbytes: int) -> tuple[Registration, int]:
    """Registers GPU memory, by dma-buf where that works, else by peermem.

    Args:
        device: the card.
        address: of the first byte, a whole allocation or within one.
        nbytes: its size.

    Returns:
        The registration, which is not in the table of regions, and by which address requests name the first byte: with
        dma-buf that is an offset, and not the pointer.

    Raises:
        UnavailableError: neither way works; says why for both.
    """
    why_not = _probe_dmabuf(device)
    if why_not is None:
        try:
            return _register_dmabuf(device, address, nbytes), address % os.sysconf("SC_PAGESIZE")
        except UnavailableError as error:
            why_not = error.reason
    missing = _probe_peermem(Path("/sys"))
    if missing is None:
        return device.register(address, nbytes, listed=False), address
    raise UnavailableError(
        f"RDMA device {device.name} does not reach GPU memory: dma-buf: {why_not}; peermem: {missing}",
        "Staging through host memory works everywhere",
    )


def _probe_dmabuf(device: Device) -> str | None:
    verbs = device.verbs
    if verbs.DmaBufMR is None:
        return "this pyverbs cannot register one (version 35 and later can)"
    enums = verbs.enums
    try:
        # No such descriptor: a kernel and provider that can do it find just that wrong.
        verbs.DmaBufMR(device.pd, 4096, enums.IBV_ACCESS_LOCAL_WRITE, dmabuf=_NO_MEMORY_FD, offset=0)
    except verbs.Error as error:
        code = error_code(error)
        if code != errno.EBADF:
            return (
                f"the driver of {device.name} takes none ({os.strerror(code) if code else error}); those of "
                "ConnectX-4 and later do, from Linux 5.12 on"
            )
    cuda = _cuda()
    if cuda is None:
        return "there is no CUDA driver (libcuda.so.1)"
    return _cuda_exports(cuda)


def _cuda() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _cuda_exports(cuda: Any) -> str | None:
    count, supported = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the CUDA driver finds no GPU"
    if cuda.cuDeviceGetAttribute(ctypes.byref(supported), _DMA_BUF_SUPPORTED, 0) != 0:
        return "the CUDA driver is too old to export memory (11.7 and later can)"
    if supported.value == 0:
        return "the GPU's driver does not export memory (the open kernel module does)"
    return None


def _probe_peermem(root: Path) -> str | None:
    if any((root / "module" / name).is_dir() for name in _MODULES):
        return None
    return "the kernel module nvidia_peermem is not loaded (modprobe nvidia-peermem)"


def _register_dmabuf(device: Device, address: int, nbytes: int) -> Registration:
    verbs, page = device.verbs, os.sysconf("SC_PAGESIZE")
    device.check_process()
    start = address // page * page
    span = -(-(address + nbytes - start) // page) * page
    fd = ctypes.c_int(-1)
    code = _cuda().cuMemGetHandleForAddressRange(
        ctypes.byref(fd), ctypes.c_uint64(start), ctypes.c_size_t(span), _RANGE_HANDLE_DMA_BUF, ctypes.c_uint64(0)
    )
    if code != 0:
        raise UnavailableError(f"the CUDA driver did not export {span:,} bytes at {start:#x} (error {code})")
    offset = address - start
    try:
        region = verbs.DmaBufMR(device.pd, nbytes, verbs.access, dmabuf=fd.value, offset=offset)
    except verbs.Error as error:
        raise UnavailableError(f"{device.name} did not register {nbytes:,} bytes of GPU memory: {error}") from error
    finally:
        os.close(fd.value)  # the registration holds the memory
    return Registration(device, region, address, nbytes, listed=False)
