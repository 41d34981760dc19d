"""Owns cross-memory attach as a transport: reads and writes at a peer process's own addresses, if the kernel lets us.

There is no signal in it: arrival is told over another transport. Whether it works is found out by a probe that moves a
token both ways, because pid namespaces, Yama, seccomp filters and missing capabilities each forbid it in their own way.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from numba import types

from gfkernels.native.jit import cfunc, njit
from gfkernels.native.libc import errno, process_vm_readv, process_vm_writev
from gfkernels.native.memory import load64, store64
from gfkernels.transport.table import OK, Fault

TOKEN_NBYTES: Final = 32
"""Bytes of token at the start of a probed area; as many again follow, into which the prober writes it back."""

_I64 = types.int64
_EINTR, _ESRCH = 4, 3
_PEER_LOST, _SYSTEM, _UNSUPPORTED = int(Fault.PEER_LOST), int(Fault.SYSTEM), int(Fault.UNSUPPORTED)

# Byte offsets in the state; the pids of all ranks follow.
_FAULT, _ERRNO, _PEER, _LOCAL, _REMOTE, _PIDS = 0, 8, 16, 24, 40, 56

_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = (1 << 64) - 1
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")


@njit
def _move(state: int, peer: int, local: int, remote: int, nbytes: int, write: bool) -> int:
    pid = load64(state + _PIDS + 8 * peer)
    done = 0
    while done < nbytes:
        # Both vectors start over: the kernel may stop anywhere, also at 2 GiB less a page.
        store64(state + _LOCAL, local + done)
        store64(state + _LOCAL + 8, nbytes - done)
        store64(state + _REMOTE, remote + done)
        store64(state + _REMOTE + 8, nbytes - done)
        if write:
            moved = process_vm_writev(pid, state + _LOCAL, 1, state + _REMOTE, 1, 0)
        else:
            moved = process_vm_readv(pid, state + _LOCAL, 1, state + _REMOTE, 1, 0)
        if moved > 0:
            done += moved
            continue
        code = errno() if moved < 0 else 0
        if code == _EINTR:
            continue
        store64(state + _ERRNO, code)
        store64(state + _PEER, peer)
        fault = _PEER_LOST if code == _ESRCH else _SYSTEM
        store64(state + _FAULT, fault)
        return -fault
    return OK


@cfunc(_I64(*(_I64,) * 8))
def put(state: int, peer: int, channel: int, src: int, dst: int, buffer: int, offset: int, nbytes: int) -> int:
    """See `Slot.PUT`; writes to the peer's own address `dst`, and only without a signal (channel -1)."""
    if channel != -1:
        return -_UNSUPPORTED
    return _move(state, peer, src, dst, nbytes, True)


@cfunc(_I64(*(_I64,) * 5))
def get(state: int, peer: int, dst: int, src: int, nbytes: int) -> int:
    """See `Slot.GET`; reads from the peer's own address `src`."""
    return _move(state, peer, dst, src, nbytes, False)


@dataclass(frozen=True)
class CmaState:
    """The state that `put` and `get` act on.

    Attributes:
        words: fault, errno, peer, scratch, then every rank's pid.
    """

    words: npt.NDArray[np.int64]

    @property
    def address(self) -> int:
        """First argument of both functions."""
        return int(self.words.ctypes.data)

    @property
    def fault(self) -> tuple[Fault, int, int] | None:
        """The last fault, its errno and the peer's rank; None while nothing failed."""
        word = int(self.words[_FAULT // 8])
        return (Fault(word), int(self.words[_ERRNO // 8]), int(self.words[_PEER // 8])) if word else None

    def explain(self) -> str:
        """The last fault in words."""
        if self.fault is None:
            return "nothing is wrong"
        fault, code, peer = self.fault
        if fault is Fault.PEER_LOST:
            return f"rank {peer} is gone (process {int(self.words[_PIDS // 8 + peer])} does not exist)"
        return f"cross-memory attach to rank {peer} failed: {_why(code)}"


def state(pids: list[int]) -> CmaState:
    """The state for a group whose ranks have these pids, as seen in this process's pid namespace."""
    words = np.zeros(_PIDS // 8 + len(pids), np.int64)
    words[_PIDS // 8 :] = pids
    return CmaState(words)


def cma_functions() -> tuple[int, int]:
    """Addresses of `put` and `get`, for a table."""
    return int(put.address), int(get.address)


def make_token() -> npt.NDArray[np.uint8]:
    """An area for a peer to probe: a random token, and room for the peer to write it back. Keep it alive."""
    area = np.zeros(2 * TOKEN_NBYTES, np.uint8)
    area[:TOKEN_NBYTES] = np.frombuffer(secrets.token_bytes(TOKEN_NBYTES), np.uint8)
    return area


def probe(pid: int, address: int, nbytes: int, expected: bytes) -> tuple[bool, str]:
    """Whether this process can read and write that one's memory; moves a token both ways.

    The token proves that `pid`, as seen from here, is the peer: in another pid namespace it may be another process.

    Args:
        pid: the peer's pid as this process should see it.
        address: in the peer, of an area like `make_token` makes.
        nbytes: of the area; the second half is written.
        expected: what the first half holds.

    Returns:
        Whether both worked, and if not, why.
    """
    half = nbytes // 2
    if len(expected) != half or half == 0:
        raise ValueError(f"an area of {nbytes} bytes holds a token of {half} bytes, not of {len(expected)}")
    if not sys.platform.startswith("linux"):
        return False, f"{sys.platform} has no process_vm_readv"
    local = np.zeros(half, np.uint8)
    one = state([pid])
    if get.ctypes(one.address, 0, int(local.ctypes.data), address, half) != OK:
        return False, f"reading process {pid}: {_why(int(one.words[_ERRNO // 8]))}"
    if local.tobytes() != expected:
        return False, (
            f"process {pid} is not the peer (its memory holds something else): the ranks are in different pid "
            "namespaces. Start the containers with one pid namespace (docker run --pid=host or --pid=container:NAME)"
        )
    if put.ctypes(one.address, 0, -1, int(local.ctypes.data), address + half, 0, 0, half) != OK:
        return False, f"writing to process {pid}: {_why(int(one.words[_ERRNO // 8]))}"
    back = np.zeros(half, np.uint8)
    if get.ctypes(one.address, 0, int(back.ctypes.data), address + half, half) != OK or back.tobytes() != expected:
        return False, f"what was written to process {pid} did not arrive there"
    return True, ""


def _why(code: int) -> str:
    name = f"{os.strerror(code)} (errno {code})" if code else "the call moved nothing"
    if code == 1:
        return f"{name}. {_permission_advice()}"
    if code == _ESRCH:
        return f"{name}: it ended, or is in another pid namespace"
    if code == 38:
        return f"{name}: the kernel, or a seccomp filter, does not offer process_vm_readv and process_vm_writev"
    if code == 14:
        return f"{name}: nothing is mapped at that address in that process"
    return name


def _permission_advice() -> str:
    scope = yama_scope()
    if scope is not None and scope >= 2:
        return f"{_YAMA} is {scope}: only root may attach (sysctl kernel.yama.ptrace_scope=1 would allow it)"
    if _seccomp_mode() == 2:
        return (
            "This process runs under a seccomp filter, which may forbid it (docker run --cap-add=SYS_PTRACE lifts it)"
        )
    if scope == 1:
        return f"{_YAMA} is 1 and the peer has not allowed it (it must not switch PR_SET_PTRACER off)"
    return "The peer belongs to another user, is not dumpable, or a security module forbids it"


def yama_scope() -> int | None:
    """What Yama allows: 0 everything, 1 descendants and whom they name, 2 root only, 3 nobody; None without Yama."""
    try:
        return int(_YAMA.read_text())
    except (OSError, ValueError):
        return None


def _seccomp_mode() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Seccomp:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def allow_ptrace(policy: str = "any") -> tuple[bool, str]:
    """Lets sibling processes attach to this one under Yama's scope 1, which otherwise lets only ancestors.

    Args:
        policy: "any": every process of this user; "parent": the parent and its descendants, which are the ranks that
            one launcher started; "off": nothing is changed.

    Returns:
        Whether the peers may attach as far as Yama goes, and why not.
    """
    if policy not in ("any", "parent", "off"):
        raise ValueError(f'policy {policy!r}, expected "any", "parent" or "off"')
    scope = yama_scope()
    if not scope:
        return True, ""
    if policy == "off":
        return False, "PR_SET_PTRACER is switched off by configuration"
    libc = ctypes.CDLL(None, use_errno=True)
    who = _PR_SET_PTRACER_ANY if policy == "any" else os.getppid()
    if libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(who), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        return False, f"prctl(PR_SET_PTRACER) failed: {os.strerror(code)}"
    return (True, "") if scope == 1 else (False, f"{_YAMA} is {scope}: only root may attach")
