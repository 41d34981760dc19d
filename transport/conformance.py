"""Owns the public conformance suite: what every transport's table must do, run on endpoints that a factory makes.

For a transport of your own, in a test file:

    SUBJECT = Subject("mine", mesh=lambda n: [...], leave=..., crash=...)

    @pytest.mark.parametrize("check", checks_for(SUBJECT), ids=lambda c: c.__name__)
    @pytest.mark.parametrize("driver", DRIVERS)
    def test_conformance(check, driver):
        check(SUBJECT, DRIVERS[driver])

A check returns when the transport conforms and raises ConformanceError when not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from gfkernels.native.jit import njit
from gfkernels.native.memory import call1, call3, call8, load64, store64
from gfkernels.transport.conformance_frames import FRAMED_CHECKS
from gfkernels.transport.conformance_rig import (
    DRIVERS,
    ROUNDS,
    ConformanceError,
    Driver,
    Subject,
    address,
    deliver,
    mesh,
    noise,
    require,
    until,
)
from gfkernels.transport.table import AGAIN, N_SLOTS, OK, Slot
from gfkernels.types import N_CHANNELS

__all__ = ["CHECKS", "DRIVERS", "ConformanceError", "Driver", "Subject", "checks_for"]

Check = Callable[[Subject, Driver], None]

_SIZES: Final = (1, 2, 3, 7, 8, 63, 64, 65, 127, 1984, 1985, 2047, 2048, 2049, 4095, 65535, 65536, 65537, 300_001)


def table_is_complete(subject: Subject, call: Driver) -> None:
    """Every peer has a row with a state, PUT and POLL; the own row is zero."""
    with mesh(subject, 3, call) as ends:
        for end in ends:
            table = end.channels.table
            require(table.shape == (3, N_SLOTS) and table.dtype == np.int64, f"table is {table.shape} {table.dtype}")
            require(not table[end.rank].any(), "the own row is not zero")
            for slot in (Slot.STATE, Slot.PUT, Slot.POLL):
                require(end.has(slot), f"a peer's row lacks {slot.name}")


def signals_are_counted(subject: Subject, call: Driver) -> None:
    """Zero-byte puts count on their own channel and peer, one each."""
    with mesh(subject, 3, call) as ends:
        for end in ends:
            end.begin(1)
        for times in range(1, 4):
            for a in ends:
                for b in ends:
                    for channel in range(N_CHANNELS if a is not b else 0):
                        if times <= channel + 1:
                            require(a.put(b, channel, None) == OK, "a signal on an idle connection was not accepted")
        for a in ends:
            for b in ends:
                for channel in range(N_CHANNELS if a is not b else 0):
                    want = min(3, channel + 1)
                    until(lambda a=a, b=b, c=channel, w=want: b.poll(a, c) == w, ends, f"{want} signals")  # type: ignore[misc]


def put_without_signal_is_not_counted(subject: Subject, call: Driver) -> None:
    """Channel -1 moves bytes and counts nothing; a later signal says that they are there."""
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, 1000)
        a.begin(1)
        b.begin(1)
        data = noise(1000)
        until(lambda: a.put(b, -1, data) == OK, [b], "a put on channel -1")
        until(lambda: a.put(b, 3, None) == OK, [b], "a signal")
        until(lambda: b.poll(a, 3) == 1, [a, b], "the signal behind the bytes")
        require(bool((target == data).all()), "the signal overtook the bytes before it")
        require(all(b.poll(a, c) == 0 for c in range(3)), "channel -1 was counted")


def sizes_and_offsets(subject: Subject, call: Driver) -> None:
    """Odd sizes at odd offsets land exactly, and nothing beside them changes."""
    with mesh(subject, 2, call) as (a, b):
        target = b.own(2, 400_000)
        a.begin(1)
        b.begin(1)
        expected = np.zeros_like(target)
        for index, nbytes in enumerate(_SIZES):
            offset = (index * 37 + 1) % 1001
            data = noise(nbytes + 1, index)[1:]  # an odd source address as well
            expected[offset : offset + nbytes] = data
            deliver(a, b, 0, data, 2, offset)
            require(bool((target == expected).all()), f"{nbytes} bytes at offset {offset} did not land as sent")


def signals_do_not_overtake(subject: Subject, call: Driver) -> None:
    """A signal on another channel, sent after a put, arrives after its bytes."""
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, 200_000)
        a.begin(1)
        b.begin(1)
        for turn in range(20):
            data = np.full(200_000, turn + 1, np.uint8)
            until(lambda data=data: a.put(b, 0, data) == OK, [b], "a put")  # type: ignore[misc]
            until(lambda: a.put(b, 1, None) == OK, [b], "a signal")
            until(lambda turn=turn: b.poll(a, 1) == turn + 1, [a, b], "the signal")  # type: ignore[misc]
            require(b.poll(a, 0) == turn + 1, "the signal overtook the put's arrival")
            require(bool((target == turn + 1).all()), "the signal overtook the put's bytes")


def counters_never_skip(subject: Subject, call: Driver) -> None:
    """Thousands of signals and small puts in flight: all accepted or AGAIN, each counted once, in order."""
    total = 3000
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, 8 * total)
        a.begin(1)
        b.begin(1)
        source = np.arange(1, total + 1, dtype=np.int64).view(np.uint8)
        landed = target.view(np.int64)
        sent = signalled = seen = 0
        for _ in range(ROUNDS):
            for _ in range(50):
                if sent < total and a.put(b, 0, source[8 * sent : 8 * sent + 8], 0, 8 * sent) == OK:
                    sent += 1
                if signalled < sent and a.put(b, 1, None) == OK:
                    signalled += 1
            require(a.progress() >= 0 and b.progress() >= 0, "progress answered a fault")
            now = b.poll(a, 0)
            require(seen <= now <= sent, f"arrivals went from {seen} to {now} with {sent} puts sent")
            require(bool((landed[:now] == np.arange(1, now + 1)).all()), "an arrival was counted before its bytes")
            require(b.poll(a, 1) <= now, "a signal overtook the put before it")
            seen = now
            if seen == total and b.poll(a, 1) == total:
                break
        require((seen, b.poll(a, 1)) == (total, total), f"{seen} of {total} puts were counted")


def both_directions_full(subject: Subject, call: Driver) -> None:
    """Two ranks that only put large messages at each other do not deadlock."""
    nbytes = 12 << 20
    with mesh(subject, 2, call) as ends:
        data = [noise(nbytes, end.rank) for end in ends]
        targets = [end.own(0, nbytes) for end in ends]
        for end in ends:
            end.begin(1)
        left = {0, 1}
        for _ in range(ROUNDS):
            for rank in left:
                code = ends[rank].put(ends[1 - rank], 0, data[rank])
                require(code in (OK, AGAIN), f"put answered {code}")
                if code == OK:
                    left.discard(rank)
                    break
            if not left:
                break
            if len(left) == 1:
                # The one that is done waits for its peer, as a plan would.
                ends[1 - next(iter(left))].progress()
        require(not left, "two ranks that put at each other are stuck")
        for rank, end in enumerate(ends):
            until(lambda end=end, peer=ends[1 - rank]: end.poll(peer) == 1, ends, "the arrival")  # type: ignore[misc]
            require(bool((targets[rank] == data[1 - rank]).all()), "bytes differ")


def ring_full(subject: Subject, call: Driver) -> None:
    """Four ranks each put large messages to the right and receive from the left."""
    size, nbytes = 4, 3 << 20
    with mesh(subject, size, call) as ends:
        data = [noise(nbytes, end.rank) for end in ends]
        targets = [end.own(0, nbytes) for end in ends]
        for end in ends:
            end.begin(1)
        left = set(range(size))
        for _ in range(ROUNDS):
            for rank in list(left):
                code = ends[rank].put(ends[(rank + 1) % size], 0, data[rank])
                require(code in (OK, AGAIN), f"put answered {code}")
                if code == OK:
                    left.discard(rank)
            require(all(end.progress() >= 0 for end in ends), "progress answered a fault")
            if not left:
                break
        require(not left, "a ring is stuck")
        for rank, end in enumerate(ends):
            before = ends[(rank - 1) % size]
            until(lambda end=end, peer=before: end.poll(peer) == 1, ends, "the arrival")  # type: ignore[misc]
            require(bool((targets[rank] == data[before.rank]).all()), "bytes differ")


def large_transfer(subject: Subject, call: Driver) -> None:
    """64 MiB in one put."""
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, 64 << 20)
        data = noise(64 << 20)
        a.begin(1)
        b.begin(1)
        deliver(a, b, 2, data)
        require(bool((target == data).all()), "bytes differ")


def offsets_above_2_31(subject: Subject, call: Driver) -> None:
    """Offsets are 64 bits wide."""
    start = (1 << 32) + 12_345
    with mesh(subject, 2, call) as (a, b):
        # Untouched pages of a zeroed array take no memory.
        target = b.own(0, start + 100_000)
        a.begin(1)
        b.begin(1)
        data = noise(50_001)
        deliver(a, b, 0, data, 0, start)
        require(bool((target[start : start + len(data)] == data).all()), "bytes did not land at an offset above 2**32")
        low = start & 0x7FFFFFFF
        require(not target[low : low + len(data)].any(), "an offset was cut to 31 bits")


def flush_after_calls(subject: Subject, call: Driver) -> None:
    """Calls follow each other with BEGIN and FLUSH; arrivals go on counting."""
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, 5000)
        for sequence in range(1, 6):
            data = noise(5000, sequence)
            a.begin(sequence)
            b.begin(sequence)
            deliver(a, b, 0, data)
            require(b.poll(a) == sequence, "arrivals started over with a call")
            require(bool((target == data).all()), "bytes differ")
            until(lambda: a.flush() == OK, [b], "flush")
            until(lambda: b.flush() == OK, [a], "flush")


def get_pulls(subject: Subject, call: Driver) -> None:
    """Where GET exists, it reads the peer's memory."""
    with mesh(subject, 2, call) as (a, b):
        if not a.has(Slot.GET):
            return
        source = noise(70_001)
        target = np.zeros_like(source)
        require(a.get(b, target, source) == OK, "get failed")
        require(bool((target == source).all()), "bytes differ")


@njit
def _stream(row: int, peer: int, source: int, landing: int, n_turns: int, words: int) -> int:
    """Ping-pong of blocks whose words all hold the turn's number; the first wrong turn, or 0."""
    state, put, poll, progress = load64(row), load64(row + 8), load64(row + 16), load64(row + 32)
    flush = load64(row + 48)
    for turn in range(1, n_turns + 1):
        _fill(source, words, turn)
        code = AGAIN
        while code == AGAIN:
            code = call8(put, state, peer, 0, source, landing, 0, 0, 8 * words)
            if code < 0:
                return code
        got = call3(poll, state, peer, 0)
        while got < turn:
            if got < 0:
                return got
            if progress != 0 and call1(progress, state) < 0:
                return -100
            got = call3(poll, state, peer, 0)
        # Only after the peer's signal for this turn may it be read, and only after ours may the peer write again.
        # The own landing place follows the source.
        for i in range(words):
            if load64(source + 8 * (words + i)) != turn:
                return turn
        code = AGAIN
        while code == AGAIN:
            code = call8(put, state, peer, 1, 0, 0, 0, 0, 0)
        while call3(poll, state, peer, 1) < turn:
            if progress != 0 and call1(progress, state) < 0:
                return -100
    code = AGAIN if flush != 0 else 0
    while code == AGAIN:
        code = call1(flush, state)
    return code


@njit
def _fill(at: int, words: int, value: int) -> None:
    for i in range(words):
        store64(at + 8 * i, value)


def concurrent_threads(subject: Subject, call: Driver) -> None:
    """Both ends at once, each in a thread of compiled code without the GIL: bytes are there when their arrival is."""
    turns, words = 300, 1000
    with mesh(subject, 2, call) as ends:
        memory = [np.zeros(2 * words, np.int64) for _ in ends]
        for end, own in zip(ends, memory, strict=True):
            end.claim(0, address(own) + 8 * words, 8 * words)
            end.begin(1)
        codes = [1, 1]

        def run(rank: int) -> None:
            peer = 1 - rank
            row = address(ends[rank].channels.table[peer])
            landing = address(memory[peer]) + 8 * words
            codes[rank] = int(_stream(row, peer, address(memory[rank]), landing, turns, words))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        require(codes == [0, 0], f"concurrent ends failed with {codes} (a turn, or a negative fault)")


CHECKS: Final[tuple[Check, ...]] = (
    table_is_complete,
    signals_are_counted,
    put_without_signal_is_not_counted,
    sizes_and_offsets,
    signals_do_not_overtake,
    counters_never_skip,
    both_directions_full,
    ring_full,
    large_transfer,
    offsets_above_2_31,
    flush_after_calls,
    get_pulls,
    concurrent_threads,
)
"""What every transport must do."""


def checks_for(subject: Subject) -> list[Check]:
    """The checks that apply to a transport: all, plus those of framed ones and of ones that can close."""
    more = [check for check, needs in FRAMED_CHECKS if needs(subject)]
    return [*CHECKS, *more]
