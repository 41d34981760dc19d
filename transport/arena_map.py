"""Owns the system calls under an arena: making and sealing a memfd, mapping it, filling and freeing its pages."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
from pathlib import Path
from typing import Final

from gfkernels.errors import UnavailableError
from gfkernels.transport import arena_memory

PAGE: Final = mmap.PAGESIZE
HUGE: Final = 2 << 20
_LARGEST: Final = 1 << 46  # a process has 2^47 bytes of addresses, and every rank of the host maps every arena
_SMALLEST: Final = 64 << 20
_FALLBACK: Final = 64 << 30  # where /proc does not tell the host's memory

_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_ADVISE_HUGE_PAGES, _ADVISE_POPULATE_WRITE = 14, 23
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 0x01, 0x02, 0x04

_libc = ctypes.CDLL(None, use_errno=True)
_pointer, _size, _int, _offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
for _name, _result, _arguments in (
    ("mmap", _pointer, [_pointer, _size, _int, _int, _int, _offset]),
    ("munmap", _int, [_pointer, _size]),
    ("madvise", _int, [_pointer, _size, _int]),
    ("fallocate", _int, [_int, _int, _offset, _offset]),
):
    if hasattr(_libc, _name):  # the package imports on systems without them
        getattr(_libc, _name).restype = _result
        getattr(_libc, _name).argtypes = _arguments


def default_size(n_local: int) -> int:
    """Bytes of address range for an arena when `n_local` ranks of the host each map all of them."""
    size = min(arena_memory.total_nbytes() or _FALLBACK, _LARGEST // max(1, n_local))
    # An address-space limit is shared with the user's own arrays; a file-size limit holds for memfds as well.
    for limit, share in ((resource.RLIMIT_AS, 4 * max(1, n_local)), (resource.RLIMIT_FSIZE, 1)):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            size = min(size, soft // share)
    return max(PAGE, size // HUGE * HUGE)


def create(size: int, shrink: bool) -> tuple[int, int, int]:
    """A sealed, sparse memfd, mapped here.

    Args:
        size: bytes; rounded up to the page.
        shrink: take less where there is not that much address space.

    Returns:
        Descriptor, size in bytes and address.

    Raises:
        UnavailableError: not possible here.
    """
    if not hasattr(os, "memfd_create"):
        raise UnavailableError("this system has no memfd_create, which shared memory needs", "Use Linux")
    size = max(1, -(-size // PAGE)) * PAGE
    try:
        fd = os.memfd_create("gfkernels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise UnavailableError(f"memfd_create failed: {error.strerror}", "Shared memory needs it") from error
    while True:
        try:
            os.ftruncate(fd, size)
            address = map_shared(fd, size)
            break
        except OSError as error:
            if shrink and size > _SMALLEST and error.errno in (errno.ENOMEM, errno.EFBIG, errno.EINVAL):
                size = max(_SMALLEST, size // 2 // HUGE * HUGE)
                continue
            os.close(fd)
            raise UnavailableError(
                f"cannot map {size} bytes for shared memory: {error.strerror}",
                "Raise the limit on address space (ulimit -v) or on file size (ulimit -f)",
            ) from error
    # A peer that maps this must never meet SIGBUS because the file got shorter. Sandboxes that cannot seal are told so
    # by the peers' check.
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
    return fd, size, address


def sealed_size(fd: int) -> int:
    """The size of a descriptor that a peer sent, or 0 where it may still be made shorter."""
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError:
        return 0
    return os.fstat(fd).st_size if seals & _SEAL_SHRINK else 0


def map_shared(fd: int, nbytes: int) -> int:
    """Maps all of a descriptor, read and write, on a huge-page boundary; the descriptor may be closed afterwards.

    Raises:
        OSError: the kernel refused.
    """
    # `mmap.mmap` would keep a duplicate of the descriptor open, and promises no alignment.
    nbytes = -(-nbytes // PAGE) * PAGE
    reserved = _mmap(0, nbytes + HUGE, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-reserved // HUGE) * HUGE
    try:
        _mmap(address, nbytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED | _MAP_NORESERVE, fd)
    except OSError:
        _libc.munmap(reserved, nbytes + HUGE)
        raise
    for start, stop in ((reserved, address), (address + nbytes, reserved + nbytes + HUGE)):
        if stop > start:
            _libc.munmap(start, stop - start)
    return address


def unmap(address: int, nbytes: int) -> None:
    """Undoes `map_shared`."""
    _libc.munmap(address, -(-nbytes // PAGE) * PAGE)


def huge_pages_on_request() -> bool:
    """Whether shared memory gets huge pages only where a program asks for them."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    except OSError:
        return False
    return "[advise]" in text


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Advice, which the kernel may ignore. Pages that exist already stay small."""
    _libc.madvise(address, nbytes, _ADVISE_HUGE_PAGES)


def populate(address: int, nbytes: int) -> bool:
    """Allocates and maps pages as a write to each would, contents unchanged.

    Returns:
        False where the kernel cannot (before Linux 5.14) or memory is short: an error here, not SIGBUS.
    """
    return int(_libc.madvise(address, nbytes, _ADVISE_POPULATE_WRITE)) == 0


def touch(address: int, nbytes: int) -> None:
    """Maps pages that are reserved already, on a kernel without `populate`; overwrites one byte of each."""
    for offset in range(0, nbytes, PAGE):
        ctypes.c_char.from_address(address + offset).value = b"\0"


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Gives pages back to the system; they read as zeros afterwards."""
    for _ in range(100):  # a signal may interrupt it any number of times, though never a hundred in a row
        if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes) == 0 or ctypes.get_errno() != errno.EINTR:
            return


def _mmap(address: int, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address or None, nbytes, protection, flags, fd, 0)
    if result is None or result == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)
