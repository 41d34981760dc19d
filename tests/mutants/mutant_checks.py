"""Owns the checks that tell the product from its mutants: each drives ranks in turns; nothing is left to luck."""

from __future__ import annotations

import ctypes
import os
import select
from typing import Any

import numpy as np
from turn_rig import Rig

from gfkernels.engine.context import Code, Ctx
from gfkernels.transport.table import AGAIN, OK, Slot

_PUT = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_int64,) * 8)
_POLL = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_int64,) * 3)
_STATE_ONLY = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


def _address(callback: object) -> int:
    return int(ctypes.cast(callback, ctypes.c_void_p).value or 0)  # type: ignore[arg-type]


def a_mismatch_is_found(engine: Any) -> None:
    """Ranks with different counts do not go on."""
    rig = Rig(2, engine=engine)
    x, y = np.ones(4, np.float32), np.ones(5, np.float32)
    assert rig.start(0, rig.request("allreduce", "float32", 4)[0], x.ctypes.data) == Code.SLICE
    assert rig.start(1, rig.request("allreduce", "float32", 5)[1], y.ctypes.data) == Code.MISMATCH


def attempts_do_not_meet(engine: Any) -> None:
    """A rank in its second attempt at a call does not take a peer's first for it."""
    rig = Rig(2, engine=engine)
    programs = rig.request("allreduce", "float32", 4)
    x, y = np.ones(4, np.float32), np.ones(4, np.float32)
    assert rig.start(0, programs[0], x.ctypes.data) == Code.SLICE
    rig.ranks[1].words[Ctx.ATTEMPT] = 1
    assert rig.start(1, programs[1], y.ctypes.data) == Code.SLICE


def a_signal_is_sent_once(engine: Any) -> None:
    """A put that answers AGAIN half-way through a signal to everyone repeats nothing."""
    rig = Rig(3, engine=engine, inline_bytes=0)
    table, sent, again = rig.channels[0].table, [], [3]
    real = {q: _PUT(int(table[q, Slot.PUT])) for q in (1, 2)}

    def put(state: int, peer: int, *rest: int) -> int:
        if peer == 2 and again[0]:
            again[0] -= 1
            return AGAIN
        sent.append(peer)
        return int(real[peer](state, peer, *rest))

    callback = _PUT(put)
    table[1:, Slot.PUT] = _address(callback)
    xs = [rank.array(np.ones(300, np.float32), True) for rank in rig.ranks]
    rig.run(rig.request("allreduce", "float32", 300), xs)
    assert again == [0]
    assert sent.count(1) == sent.count(2)


def abort_ends_a_wait(engine: Any) -> None:
    """The abort word ends a wait at once."""
    rig = Rig(2, engine=engine)
    x = np.ones(4, np.float32)
    rig.start(0, rig.request("allreduce", "float32", 4)[0], x.ctypes.data)
    rig.ranks[0].control[:8].view(np.int64)[0] = 1
    assert rig.resume(0) == Code.ABORTED


def last_words_are_heard(engine: Any) -> None:
    """A signal that comes together with the news of its sender's end is seen first."""
    rig = Rig(2, engine=engine, inline_bytes=0)
    programs = rig.request("allreduce", "float32", 64)
    xs = [rig.ranks[r].array(np.ones(64, np.float32), True) for r in range(2)]
    words = rig.ranks[0].words
    reader, writer = os.pipe()
    fds = rig.ranks[0].memory(1)
    fds[0] = reader | select.POLLIN << 32
    words[Ctx.FDS], words[Ctx.N_FDS], words[Ctx.N_EVENT_FDS] = fds.ctypes.data, 1, 1
    polls: list[int] = []

    def poll(state: int, peer: int, channel: int) -> int:
        polls.append(peer)
        # The first look is part of a round in which rows ran; the second one is idle, and meets the news.
        if len(polls) == 2:
            os.write(writer, b"x")
        return 1 if len(polls) > 2 else 0

    callback = _POLL(poll)
    rig.channels[0].table[1, Slot.POLL] = _address(callback)
    assert rig.start(1, programs[1], xs[1].ctypes.data) == Code.SLICE
    words[Ctx.SLICE_NS] = 60_000_000_000
    words[Ctx.LAST_POLL_NS] = 0  # it looks at its first idle round
    assert rig.start(0, programs[0], xs[0].ctypes.data) == Code.DONE
    assert len(polls) == 3


def pending_calls_go_first(engine: Any) -> None:
    """A blocking call stands behind queued ones."""
    rig = Rig(2, engine=engine)
    rig.ranks[0].words[Ctx.PENDING] = 1
    x = np.ones(4, np.float32)
    assert rig.start(0, rig.request("allreduce", "float32", 4)[0], x.ctypes.data) == Code.QUEUED


def a_call_ends_with_a_flush(engine: Any) -> None:
    """Where the transport has FLUSH, no call is over before it answered OK."""
    rig = Rig(2, engine=engine)
    answers = [AGAIN, AGAIN, OK]
    given: list[int] = []

    def flush(state: int) -> int:
        given.append(answers[len(given)])
        return given[-1]

    callback = _STATE_ONLY(flush)
    rig.channels[0].table[1, Slot.FLUSH] = _address(callback)
    rig.ranks[0].words[Ctx.HAS_CALLS] = 1
    rig.run(rig.request("allreduce", "float32", 4), [np.ones(4, np.float32) for _ in range(2)])
    assert given == answers


def graves_are_kept(site: Any) -> None:
    """What a peer may still touch is kept until it may not."""
    graveyard, safe = site.Graveyard(), [False]
    graveyard.bury(lambda: safe[0], object())
    assert graveyard.reap() == 1
    safe[0] = True
    assert graveyard.reap() == 0
