"""Owns shared memory as a transport: a copy into a mapped span, and arrival counters that live with the receiver.

Each ordered pair of ranks and channel has one counter on a cache line of its own in the receiver's control block, so a
receiver polls its own memory and no two writers share a line.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from numba import types

from gfkernels.native.jit import cfunc
from gfkernels.native.libc import copy
from gfkernels.native.memory import load64, load_acquire, store64, store_release
from gfkernels.transport.table import N_SLOTS, OK, Channels, Slot
from gfkernels.types import N_CHANNELS

_I64 = types.int64
_LINE: Final = 64

# The state of one peer: words addressed from `state`.
_WORDS_PER_CHANNEL: Final = 3
_OUT, _IN, _SENT = 0, 8, 16  # byte offsets: peer's counter for us, our counter for the peer, how often we signalled


def arrivals_nbytes(size: int) -> int:
    """Bytes of arrival counters that a rank needs in its control block, for a group of `size` ranks."""
    return size * N_CHANNELS * _LINE


@cfunc(_I64(*(_I64,) * 8))
def _put(state: int, peer: int, channel: int, src: int, dst: int, buffer: int, offset: int, nbytes: int) -> int:
    if nbytes > 0:
        copy(dst, src, nbytes)
    if channel >= 0:
        words = state + channel * _WORDS_PER_CHANNEL * 8
        sent = load64(words + _SENT) + 1
        store64(words + _SENT, sent)
        store_release(load64(words + _OUT), sent)
    return OK


@cfunc(_I64(_I64, _I64, _I64))
def _poll(state: int, peer: int, channel: int) -> int:
    return load_acquire(load64(state + channel * _WORDS_PER_CHANNEL * 8 + _IN))


@cfunc(_I64(*(_I64,) * 5))
def _get(state: int, peer: int, dst: int, src: int, nbytes: int) -> int:
    copy(dst, src, nbytes)
    return OK


def channels(rank: int, arrivals: list[int]) -> Channels:
    """The table of a group whose ranks all share this host.

    Args:
        rank: this rank within the group.
        arrivals: address, in this process, of every rank's arrival counters (`arrivals_nbytes` each, zeroed).
    """
    size = len(arrivals)
    table = np.zeros((size, N_SLOTS), np.int64)
    state: npt.NDArray[np.int64] = np.zeros((size, N_CHANNELS, _WORDS_PER_CHANNEL), np.int64)
    for peer in range(size):
        for channel in range(N_CHANNELS):
            state[peer, channel, 0] = arrivals[peer] + (rank * N_CHANNELS + channel) * _LINE
            state[peer, channel, 1] = arrivals[rank] + (peer * N_CHANNELS + channel) * _LINE
        if peer != rank:
            table[peer, Slot.STATE] = state[peer].ctypes.data
            table[peer, Slot.PUT] = _put.address
            table[peer, Slot.POLL] = _poll.address
            table[peer, Slot.GET] = _get.address
    return Channels(table=table, keep=[state], block_fds=[])
