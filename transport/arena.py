"""Owns a process's shared memory: one sparse memfd that all ranks of the host map, and the arrays cut from it.

A memfd rather than a file in /dev/shm: that one is 64 MB in containers and kills with SIGBUS when full, and a memfd is
gone with its last user, however the process dies. Memory is reserved before anyone touches it, so that a shortage is
an error of the call that asked.
"""

from __future__ import annotations

import collections
import errno
import gc
import math
import operator
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gfkernels.errors import UsageError
from gfkernels.transport import arena_map, arena_memory
from gfkernels.transport.announced import announced
from gfkernels.transport.arena_map import HUGE, PAGE
from gfkernels.transport.arena_space import FreeSpace
from gfkernels.types import DTYPES, DType, from_numpy

_STEP: Final = 256 << 20  # reserve in pieces: a signal makes the kernel undo and start the current piece again
_HEADROOM: Final = 16 << 20  # left for everybody's page tables and small allocations
_SHORTAGES: Final = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


class Block:
    """Some bytes of an arena, given back when the last array over them dies (or by `release`).

    Attributes:
        arena: where they are.
        offset: first byte within the arena.
        nbytes: bytes asked for.
        address: first byte in this process.
    """

    def __init__(self, arena: Arena, offset: int, nbytes: int, reserved: int) -> None:
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.address = arena.address + offset
        self._finalizer = weakref.finalize(self, arena._give_back, offset, reserved)
        # At exit the kernel takes all of it back; unmapping while other threads still run would crash them.
        self._finalizer.atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}

    def array(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An ordinary array over the block's first bytes; it and its views keep the block."""
        element = np.dtype(dtype)
        nbytes = math.prod(shape) * element.itemsize
        return np.asarray(self)[:nbytes].view(element).reshape(tuple(shape))

    def release(self) -> None:
        """Gives the bytes back now; nobody may hold an array over them any more. Harmless when repeated."""
        self._finalizer()


class Arena:
    """This process's shareable memory. Safe for threads; unusable in a forked child.

    Attributes:
        fd: the memfd; -1 once it is closed.
        address: where it is mapped here.
        size: bytes that can be addressed, of which only what blocks hold takes memory.
    """

    def __init__(self, size: int | None = None, *, n_local: int = 1) -> None:
        """Makes an empty arena.

        Args:
            size: bytes of address range; by default what the host has, less where address space is limited.
            n_local: ranks on this host, all of which map it.

        Raises:
            UnavailableError: there is no memfd or not enough address space here.
        """
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._returned: collections.deque[tuple[int, int]] = collections.deque()
        self._n_blocks = 0
        self._keys: dict[int, int] = {}  # what blocks were announced as, by offset
        self._closing = False
        wanted = arena_map.default_size(n_local) if size is None else size
        self.fd, self.size, self.address = arena_map.create(wanted, shrink=size is None)
        self._space = FreeSpace(self.size)
        self._huge = arena_map.huge_pages_on_request()

    def allocate(self, nbytes: int, alignment: int = PAGE) -> Block:
        """Reserves `nbytes` (at least a page) and touches them; the contents are arbitrary.

        Args:
            nbytes: how many bytes.
            alignment: of the offset; a page at least.

        Raises:
            UsageError: not enough memory, or a closed arena, or a forked child; nothing was taken.
        """
        self.check_owner()
        if nbytes < 0:
            raise UsageError(f"cannot allocate {nbytes} bytes: the number is negative")
        reserved = max(1, -(-nbytes // PAGE)) * PAGE
        self._check_room(reserved, nbytes)
        offset = self._take(reserved, max(PAGE, alignment, HUGE if self._huge and reserved >= HUGE else 0))
        if offset is None:
            raise UsageError(
                f"{nbytes} bytes of shared memory asked for, {self.size - self.used_nbytes} available, in pieces, in "
                f"this process's arena of {self.size} bytes. Drop arrays that are no longer used, ask for "
                "less, or raise arena_bytes (GFKERNELS_ARENA_BYTES)"
            )
        try:
            self._reserve(offset, reserved, nbytes)
        except BaseException:
            self._give_back(offset, reserved)
            raise
        block = Block(self, offset, nbytes, reserved)
        self._keys[offset] = announced.add(block.address, reserved)
        return block

    def empty(self, shape: int | Sequence[int], dtype: str | DType | npt.DTypeLike = "float32") -> npt.NDArray[Any]:
        """An ordinary numpy array in the arena; its block is given back with its last view.

        A zero-size array takes no shared memory, and `contains` is false for it.

        Raises:
            UsageError: a bad shape or dtype, or not enough memory.
        """
        dimensions, element = _shape(shape), _element(dtype)
        nbytes = math.prod(dimensions) * element.itemsize
        if nbytes == 0:
            self.check_owner()
            return np.empty(dimensions, element)
        return self.allocate(nbytes).array(dimensions, element)

    def contains(self, address: int, nbytes: int) -> bool:
        """Whether these bytes lie in the arena, so that the host's other ranks can reach them."""
        return self.address <= address and address + nbytes <= self.address + self.size and not self.closed

    def offset_of(self, address: int) -> int:
        """Where an address lies in the arena, in bytes.

        Raises:
            UsageError: not in the arena.
        """
        if not self.contains(address, 1):
            raise UsageError(f"address {address:#x} is not in this process's shared memory; use gfkernels.empty")
        return address - self.address

    @property
    def used_nbytes(self) -> int:
        """Bytes that blocks hold, in whole pages."""
        self._collect()
        with self._lock:
            return self.size - self._space.free_nbytes

    @property
    def closed(self) -> bool:
        """Whether the mapping is gone."""
        return self.fd < 0

    @property
    def owned(self) -> bool:
        """False in a forked child, which must leave its parent's memory alone."""
        return os.getpid() == self._pid

    def check_owner(self) -> None:
        """Does nothing in the process that made the arena.

        Raises:
            UsageError: this is a forked child.
        """
        if not self.owned:
            raise UsageError(
                f"process {os.getpid()} was forked from rank process {self._pid} and cannot use its shared memory: "
                "make and reduce arrays in the process that called gfkernels.init"
            )

    def close(self) -> None:
        """Refuses new blocks; unmaps once no array uses the memory, which may be now, later, or at process exit."""
        if self.owned:
            with self._lock:
                self._closing = True
            self._collect()

    def _take(self, reserved: int, step: int) -> int | None:
        self._collect()
        with self._lock:
            if self._closing:
                raise UsageError("this process's shared memory is closed: call gfkernels.init again first")
            offset = self._space.take(reserved, step)
            self._n_blocks += offset is not None
        self._collect()
        return offset

    def _check_room(self, reserved: int, nbytes: int) -> None:
        available, source = arena_memory.available_nbytes()
        if reserved + _HEADROOM > available:
            gc.collect()  # arrays in reference cycles may be holding what is missing
            self._collect()
            available, source = arena_memory.available_nbytes()
        if reserved + _HEADROOM > available:
            raise _short(nbytes, max(0, available - _HEADROOM), source)

    def _reserve(self, offset: int, reserved: int, nbytes: int) -> None:
        huge = self._huge and reserved >= HUGE
        if huge:
            arena_map.ask_for_huge_pages(self.address + offset, reserved)
        for start in range(offset, offset + reserved, _STEP):
            piece = min(_STEP, offset + reserved - start)
            if start > offset:
                self._check_room(piece, nbytes)  # other ranks allocate at the same time
            # Huge pages come only from a fault in the advised range, so populate goes first there.
            done = huge and arena_map.populate(self.address + start, piece)
            try:
                os.posix_fallocate(self.fd, start, piece)
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                available, source = arena_memory.available_nbytes()
                raise _short(nbytes, available, f"{os.strerror(error.errno)}; {source}") from error
            if not (done or arena_map.populate(self.address + start, piece)):
                arena_map.touch(self.address + start, piece)

    def _give_back(self, offset: int, reserved: int) -> None:
        # Runs from the garbage collector, perhaps inside `allocate` of this very thread: it may not wait for the lock.
        if self.owned:
            self._returned.append((offset, reserved))
            self._collect()

    def _collect(self) -> None:
        """Frees what has come back; where somebody else holds the lock, they look again after letting go."""
        while (self._returned or self._closing) and not self.closed and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    offset, reserved = self._returned.popleft()
                    # Before the pages change: a card would go on using the old ones.
                    announced.remove(self._keys.pop(offset, -1))
                    arena_map.punch(self.fd, offset, reserved)
                    self._space.give(offset, reserved)
                    self._n_blocks -= 1
                if self._closing and self._n_blocks == 0:
                    arena_map.unmap(self.address, self.size)
                    os.close(self.fd)
                    self.fd = -1
            finally:
                self._lock.release()
            if not self._returned:
                return


def _short(nbytes: int, available: int, source: str) -> UsageError:
    return UsageError(
        f"{nbytes} bytes of shared memory asked for, {available} available: {source}. Free some memory, raise the "
        "limit, or ask for less"
    )


def _shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        dimensions = tuple(operator.index(n) for n in (shape if isinstance(shape, Sequence) else (shape,)))
    except TypeError:
        raise UsageError(f"shape {shape!r} is not an integer or a sequence of integers") from None
    if any(n < 0 for n in dimensions):
        raise UsageError(f"shape {dimensions} has a negative dimension")
    return dimensions


def _element(dtype: str | DType | npt.DTypeLike) -> np.dtype[Any]:
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype].numpy
    try:
        element = dtype.numpy if isinstance(dtype, DType) else np.dtype(dtype)
    except TypeError:
        raise UsageError(f"dtype {dtype!r} is not known; supported: {', '.join(DTYPES)}") from None
    if from_numpy(element) is None:
        raise UsageError(f"dtype {element} is not supported; supported: {', '.join(DTYPES)}")
    return element
