"""What the engine answers besides "done": who may enter, who disagrees, what ends a wait, what a put may answer."""

from __future__ import annotations

import ctypes
import os
import select
from typing import Any

import numpy as np
import pytest
from turn_rig import Rig

from gfkernels import engine
from gfkernels.engine.context import Code, Ctx, Owner, Phase
from gfkernels.engine.executor import blocked_on, reenter
from gfkernels.transport.table import AGAIN, OK, Fault, Slot


def _address(callback: Any) -> int:
    return int(ctypes.cast(callback, ctypes.c_void_p).value or 0)


def _blocked(rig: Rig) -> tuple[list[np.ndarray], list[object]]:
    """Rank 0 waits in a call that rank 1 has not entered."""
    xs = [np.full(4, r + 1.0, np.float32) for r in range(rig.size)]
    programs = rig.request("allreduce", "float32", 4)
    assert rig.start(0, programs[0], xs[0].ctypes.data) == Code.SLICE
    return xs, list(programs)


def test_a_refusing_engine_does_nothing() -> None:
    rig = Rig(2)
    rig.ranks[0].words[Ctx.REFUSE] = 1
    assert rig.start(0, rig.request("allreduce", "float32", 4)[0], 0) == Code.REFUSED
    assert rig.ranks[0].words[Ctx.SEQUENCE] == 0


def test_one_caller_at_a_time() -> None:
    rig = Rig(2)
    _, programs = _blocked(rig)
    assert rig.start(0, programs[0], 0) == Code.BUSY  # type: ignore[arg-type]
    assert rig.ranks[0].words[Ctx.LOCK] == Owner.CALLER
    assert engine.acquire(rig.ranks[0].ctx, Owner.QUEUE) == 0


def test_pending_calls_go_first() -> None:
    rig = Rig(2)
    rig.ranks[0].words[Ctx.PENDING] = 1
    assert rig.start(0, rig.request("allreduce", "float32", 4)[0], 0) == Code.QUEUED
    assert rig.ranks[0].words[Ctx.LOCK] == Owner.NOBODY


def test_a_mismatch_is_found_by_whoever_looks_second() -> None:
    rig = Rig(3)
    xs = [np.ones(4, np.float32) for _ in range(3)]
    four, five = rig.request("allreduce", "float32", 4), rig.request("allreduce", "float32", 3)
    assert rig.start(0, four[0], xs[0].ctypes.data) == Code.SLICE
    # Rank 1 never comes; that must not hide that ranks 0 and 2 disagree.
    assert rig.start(2, five[2], xs[2].ctypes.data) == Code.MISMATCH
    assert rig.ranks[2].words[Ctx.PEER] == 0
    assert rig.resume(0) == Code.MISMATCH
    assert rig.ranks[0].words[Ctx.PEER] == 2
    assert all(np.array_equal(x, np.ones(4, np.float32)) for x in xs)


def test_the_abort_word_ends_a_wait() -> None:
    rig = Rig(2)
    _blocked(rig)
    rig.ranks[0].control[:8].view(np.int64)[0] = 1
    assert rig.resume(0) == Code.ABORTED


def test_an_event_is_told_after_one_more_round() -> None:
    rig = Rig(2)
    xs, programs = _blocked(rig)
    reader, writer = os.pipe()
    fds = rig.ranks[0].memory(1)
    fds[0] = reader | select.POLLIN << 32
    words = rig.ranks[0].words
    words[Ctx.FDS], words[Ctx.N_FDS], words[Ctx.N_EVENT_FDS] = fds.ctypes.data, 1, 1
    words[Ctx.SLICE_NS] = 50_000_000
    os.write(writer, b"x")
    assert rig.resume(0) == Code.EVENT
    # The peer's part is there together with the news: the call ends well.
    words[Ctx.SLICE_NS] = 0
    rig.start(1, programs[1], xs[1].ctypes.data)  # type: ignore[arg-type]
    assert rig.resume(0) == Code.DONE
    os.close(reader)
    os.close(writer)


def test_handover_ends_a_slice_early() -> None:
    rig = Rig(2)
    _blocked(rig)
    rig.ranks[0].words[Ctx.SLICE_NS] = 3_600_000_000_000
    rig.ranks[0].words[Ctx.HANDOVER] = 1
    assert rig.resume(0) == Code.SLICE


def test_who_is_missing() -> None:
    rig = Rig(3)
    _blocked(rig)
    assert [blocked_on(rig.ranks[0].ctx, q) for q in (1, 2)] == [1, 1]
    rig.start(2, rig.request("allreduce", "float32", 4)[2], np.ones(4, np.float32).ctypes.data)
    assert [blocked_on(rig.ranks[0].ctx, q) for q in (1, 2)] == [1, 0]


def test_ranks_in_different_attempts_do_not_meet() -> None:
    rig = Rig(2)
    xs, programs = _blocked(rig)
    rig.ranks[1].words[Ctx.ATTEMPT] = 1
    assert rig.start(1, programs[1], xs[1].ctypes.data) == Code.SLICE  # type: ignore[arg-type]
    assert rig.resume(0) == Code.SLICE
    rig.ranks[0].words[Ctx.ATTEMPT] = 1
    reenter(rig.ranks[0].ctx)
    assert rig.resume(0) == Code.DONE
    assert rig.resume(1) == Code.DONE
    assert xs[0].tolist() == [3.0] * 4 == xs[1].tolist()


def test_a_signal_to_everyone_is_not_repeated_after_again() -> None:
    rig = Rig(3, inline_bytes=0)
    sent: list[int] = []
    again = [2]
    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_int64,) * 8)
    table = rig.channels[0].table
    real = {q: prototype(int(table[q, Slot.PUT])) for q in (1, 2)}

    def put(state: int, peer: int, *rest: int) -> int:
        if peer == 2 and again[0]:
            again[0] -= 1
            return AGAIN
        sent.append(peer)
        return int(real[peer](state, peer, *rest))

    callback = prototype(put)
    table[1:, Slot.PUT] = _address(callback)
    xs = [rig.ranks[r].array(np.full(300, r + 1.0, np.float32), True) for r in range(3)]
    rig.run(rig.request("allreduce", "float32", 300), xs)
    assert again == [0], "the fault was never met"
    assert all(x.tolist() == [6.0] * 300 for x in xs)
    assert sorted(sent) == [1] * sent.count(1) + [2] * sent.count(2) and sent.count(1) == sent.count(2)
    rig.run(rig.request("allreduce", "float32", 300), [np.ones(300, np.float32) for _ in range(3)])


def test_a_fault_names_the_peer() -> None:
    rig = Rig(3, inline_bytes=0)
    prototype = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_int64,) * 3)
    hit: list[int] = []

    def poll(state: int, peer: int, channel: int) -> int:
        hit.append(peer)
        return -int(Fault.SYSTEM)

    callback = prototype(poll)
    rig.channels[1].table[2, Slot.POLL] = _address(callback)
    xs = [np.ones(300, np.float32) for _ in range(3)]
    programs = rig.request("allreduce", "float32", 300)
    codes = [Code.SLICE] * 3
    for r in (0, 1, 2):
        codes[r] = Code(rig.start(r, programs[r], xs[r].ctypes.data))
    for _ in range(10):
        for r in (0, 1, 2):
            if codes[r] == Code.NEED_PLAN:
                programs[r].build(rig.ranks[r].words[Ctx.KIND])
            if codes[r] in (Code.SLICE, Code.NEED_PLAN):
                codes[r] = Code(rig.resume(r))
    assert codes[1] == Code.FAULT and hit
    words = rig.ranks[1].words
    assert (words[Ctx.FAULT], words[Ctx.PEER]) == (Fault.SYSTEM, 2)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(8, np.float64),
        np.zeros(9, np.float32),
        np.zeros(16, np.float32)[::2],
        np.zeros((2, 5), np.float32)[:, :4],
        np.zeros(36, np.uint8)[1:33].view(np.float32),
        np.zeros((), np.float32),
        np.asfortranarray(np.zeros((2, 4), np.float32)),
    ],
    ids=["dtype", "count", "strided", "rows", "unaligned", "0-d", "fortran"],
)
def test_the_fast_path_refuses_what_it_cannot_do(array: np.ndarray) -> None:
    rig = Rig(2)
    program = rig.request("allreduce", "float32", 8)[0]
    assert engine.call_array(rig.ranks[0].ctx, program.address, id(array)) == Code.NOT_FAST
    assert rig.ranks[0].words[Ctx.LOCK] == Owner.NOBODY and rig.ranks[0].words[Ctx.SEQUENCE] == 0


def test_the_fast_path_refuses_what_is_read_only_and_takes_the_rest() -> None:
    rig = Rig(2)
    program = rig.request("allreduce", "float32", 8)[0]
    array = np.zeros((2, 4), np.float32)
    array.flags.writeable = False
    assert engine.call_array(rig.ranks[0].ctx, program.address, id(array)) == Code.NOT_FAST
    array.flags.writeable = True
    assert engine.call_array(rig.ranks[0].ctx, program.address, id(array)) == Code.SLICE
    assert rig.ranks[0].words[Ctx.PHASE] == Phase.ENTER
    assert OK == 0


def _pair(x: np.ndarray, out: np.ndarray, fits: bool) -> None:
    rig = Rig(2)
    program = rig.request("allgather", "float32", 8)[0]
    code = engine.call_arrays(rig.ranks[0].ctx, program.address, id(x), id(out))
    assert code == (Code.SLICE if fits else Code.NOT_FAST)
    assert rig.ranks[0].words[Ctx.PHASE] == (Phase.ENTER if fits else Phase.IDLE)


def test_the_fast_path_for_two_arrays() -> None:
    whole = np.zeros(64, np.float32)
    x, out = np.zeros((2, 4), np.float32), np.zeros((2, 2, 4), np.float32)
    _pair(x, out, True)
    _pair(whole[:8], whole[8:24], True)
    _pair(whole[16:24], whole[:16], True)
    _pair(whole[:8], whole[7:23], False)
    _pair(whole[15:23], whole[:16], False)
    _pair(x, out.astype(np.float64), False)
    _pair(x.astype(np.int32), out, False)
    _pair(whole[:16:2], out, False)
    _pair(x, np.zeros((4, 2, 4), np.float32)[::2], False)
    _pair(np.zeros(7, np.float32), out, False)
    x.flags.writeable = False
    _pair(x, out, True)
    out.flags.writeable = False
    _pair(x, out, False)
