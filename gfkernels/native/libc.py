"""Owns the libc functions that compiled code calls by name, and reading `errno` after them."""

from __future__ import annotations

from numba import types

from gfkernels.native.jit import njit
from gfkernels.native.memory import BLOCK_NBYTES, LINE_NBYTES, copy_block, load32, load64, store_release, stream_block

_i32, _i64 = types.int32, types.int64
_CLOCK_MONOTONIC = 1
_LONG_NBYTES = 2048

sched_yield = types.ExternalFunction("sched_yield", _i32())
memcpy = types.ExternalFunction("memcpy", _i64(_i64, _i64, _i64))
usleep = types.ExternalFunction("usleep", _i32(types.uint32))
poll = types.ExternalFunction("poll", _i32(_i64, _i64, _i32))
clock_gettime = types.ExternalFunction("clock_gettime", _i32(_i32, _i64))
process_vm_readv = types.ExternalFunction("process_vm_readv", _i64(_i32, _i64, _i64, _i64, _i64, _i64))
process_vm_writev = types.ExternalFunction("process_vm_writev", _i64(_i32, _i64, _i64, _i64, _i64, _i64))
send = types.ExternalFunction("send", _i64(_i32, _i64, _i64, _i32))
recv = types.ExternalFunction("recv", _i64(_i32, _i64, _i64, _i32))
recvmsg = types.ExternalFunction("recvmsg", _i64(_i32, _i64, _i32))
sendmsg = types.ExternalFunction("sendmsg", _i64(_i32, _i64, _i32))
_errno_location = types.ExternalFunction("__errno_location", _i64())


@njit
def copy(dst: int, src: int, nbytes: int) -> None:
    """Copies bytes between spans that do not overlap.

    For long spans libc prefers `rep movsb`, and stores past the caches beyond a size that it takes from CPUID, where
    virtual machines tell tall tales. Both were 1.3 to 1.5 times slower than plain vectors through staging memory.
    """
    done = 0
    if nbytes >= _LONG_NBYTES:
        while done + BLOCK_NBYTES <= nbytes:
            copy_block(dst + done, src + done)
            done += BLOCK_NBYTES
    memcpy(dst + done, src + done, nbytes - done)


@njit
def stream(dst: int, src: int, nbytes: int) -> None:
    """As `copy`, past the caches but for what does not fill a cache line. `drain_streams` has to follow."""
    done = min(-dst % LINE_NBYTES, nbytes)
    memcpy(dst, src, done)
    while done + BLOCK_NBYTES <= nbytes:
        stream_block(dst + done, src + done)
        done += BLOCK_NBYTES
    memcpy(dst + done, src + done, nbytes - done)


@njit
def publish(address: int, value: int) -> None:
    """`store_release` for the interpreter, to compiled code that runs at the same time."""
    store_release(address, value)


@njit
def errno() -> int:
    """The calling thread's errno, valid straight after a failed call."""
    return load32(_errno_location())


@njit
def now_ns(timespec: int) -> int:
    """CLOCK_MONOTONIC in ns; `timespec` is the address of 16 bytes of scratch."""
    clock_gettime(_CLOCK_MONOTONIC, timespec)
    return load64(timespec) * 1_000_000_000 + load64(timespec + 8)
