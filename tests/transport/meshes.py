"""Meshes of all in-tree transports within one process, for the conformance suite and the transports' own tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from fake_verbs import Fabric

from gfkernels.transport import shm
from gfkernels.transport.conformance import Subject
from gfkernels.transport.meeting import Exchange
from gfkernels.transport.table import Channels
from gfkernels.transport.tcp import TcpChannels
from gfkernels.transport.tcp_connect import connect
from gfkernels.transport.verbs import loopback
from gfkernels.transport.verbs.channels import VerbsChannels

SECRET = b"a secret of these tests"


def in_threads(size: int, work: Callable[[int, Exchange], Any]) -> list[Any]:
    """Runs `work(rank, exchange)` in one thread a rank; results or exceptions by rank."""

    def part(rank: int, exchange: Exchange) -> Any:
        try:
            return work(rank, exchange)
        except Exception as error:
            return error

    return loopback.in_threads(part, size, patience_s=20)


def tcp_mesh(size: int) -> list[TcpChannels]:
    """TCP over loopback, connected as a communicator would."""
    ends = in_threads(size, lambda rank, exchange: connect(rank, size, exchange=exchange, secret=SECRET, timeout_s=10))
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return ends


def shm_mesh(size: int) -> list[Channels]:
    """Shared memory, with all ranks' counters in this process."""
    counters = [np.zeros(shm.arrivals_nbytes(size) // 8 + 8, np.int64) for _ in range(size)]
    addresses = [int(c.ctypes.data) + -int(c.ctypes.data) % 64 for c in counters]
    ends = [shm.channels(rank, addresses) for rank in range(size)]
    for end in ends:
        end.keep.append(counters)
    return ends


def verbs_mesh(size: int, *, n_rails: int = 1, registered: tuple[int, ...] = ()) -> list[VerbsChannels]:
    """The compiled half of the verbs transport over a card that is an imitation."""
    return Fabric().mesh(size, n_rails=n_rails, registered=registered)


def _leave_verbs(end: Channels) -> None:
    assert isinstance(end, VerbsChannels)
    fabric = next(kept[0] for kept in end.keep if isinstance(kept, tuple) and isinstance(kept[0], Fabric))
    end.close()
    assert not fabric.sins, fabric.sins


def _leave(end: Channels) -> None:
    assert isinstance(end, TcpChannels)
    end.close()


def _crash(end: Channels) -> None:
    assert isinstance(end, TcpChannels)
    end.close(leave=False)


SUBJECTS = [
    Subject("tcp", tcp_mesh, leave=_leave, crash=_crash),
    Subject("shm", shm_mesh, framed=False),
    Subject("verbs-frames", verbs_mesh, leave=_leave_verbs, streamed=False),
    Subject("verbs-writes", partial(verbs_mesh, registered=(0, 1, 2, 3)), leave=_leave_verbs, streamed=False),
    Subject("verbs-mixed", partial(verbs_mesh, registered=(0, 2)), leave=_leave_verbs, streamed=False),
]
