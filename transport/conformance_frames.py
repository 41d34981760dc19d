"""Owns the conformance checks of framed transports: calls kept apart, disagreement, bad frames, peers that go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from gfkernels.transport.conformance_rig import (
    ROUNDS,
    Bytes,
    Driver,
    Endpoint,
    Subject,
    address,
    deliver,
    mesh,
    noise,
    require,
    until,
    until_fault,
)
from gfkernels.transport.table import AGAIN, OK, Fault, Slot
from gfkernels.types import N_BUFFERS


def again_keeps_the_put(subject: Subject, call: Driver) -> None:
    """A put that answers AGAIN goes on with the same arguments, and is delivered exactly once.

    Meanwhile other puts with payload answer AGAIN or go through whole, and signals stay behind it.
    """
    nbytes = 32 << 20
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, nbytes)
        other = b.own(1, 1000)
        a.begin(1)
        b.begin(1)
        data, small = noise(nbytes), noise(1000, 2)
        require(a.put(b, 0, data) == AGAIN, "32 MiB to a peer that does not receive were accepted at once")
        for _ in range(100):
            require(a.put(b, 0, data) == AGAIN, "a put was accepted whose bytes cannot have left")
        require(a.put(b, 2, small, 1) == AGAIN, "two puts are in progress on one connection")
        for _ in range(10):
            require(a.put(b, 1, None) == OK, "a signal was not queued behind a put")
        codes: list[int] = []

        def finished() -> bool:
            if not codes:
                require(a.put(b, 0, data[:1000]) == AGAIN, "another put was taken for the one in progress")
                code = a.put(b, 0, data)
                if code == OK:
                    codes.append(code)
                require(b.poll(a, 1) == 0 or bool(codes) or b.poll(a, 0) == 1, "a signal overtook the put before it")
            return bool(codes) and b.poll(a, 0) == 1 and b.poll(a, 1) == 10

        until(finished, [a, b], "the put")
        deliver(a, b, 2, small, 1)
        require(bool((target == data).all() and (other == small).all()), "bytes differ")
        require(b.poll(a, 0) == 1, "a put was delivered twice")


def many_signals_behind_a_full_socket(subject: Subject, call: Driver) -> None:
    """Signals that find no room answer AGAIN and none is lost."""
    with mesh(subject, 2, call) as (a, b):
        b.own(0, 16 << 20)
        a.begin(1)
        b.begin(1)
        data = noise(16 << 20)
        require(a.put(b, 0, data) == AGAIN, "16 MiB to a peer that does not receive were accepted at once")
        accepted = 0
        while a.put(b, 1, None) == OK:
            accepted += 1
            require(accepted < 1_000_000, "a million signals were accepted though nothing can leave")
        done = [False]

        def finished() -> bool:
            done[0] = done[0] or a.put(b, 0, data) == OK
            return done[0] and b.poll(a, 1) == accepted

        until(finished, [a, b], f"{accepted} signals")


def accepted_signals_leave_by_progress(subject: Subject, call: Driver) -> None:
    """What was accepted leaves without another put: PROGRESS sends it."""
    with mesh(subject, 2, call) as (a, b):
        a.begin(1)
        b.begin(1)
        accepted = 0
        while accepted < 200_000 and a.put(b, 1, None) == OK:
            accepted += 1
        until(lambda: b.poll(a, 1) == accepted, [a, b], f"{accepted} signals that were accepted")


def signals_survive_a_cut_behind_a_put(subject: Subject, call: Driver) -> None:
    """Wherever the socket fills up in put, signals, put, signals: the stream goes on in order."""
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, 5 << 20)
        a.begin(1)
        b.begin(1)
        signals = 0
        for turn in range(20):
            # Sizes differ by less than the queue of signals is long, so that some cut falls into the queue.
            data = noise((4 << 20) + 12_000 * turn, turn)
            code = a.put(b, 0, data)
            while code == AGAIN:
                for _ in range(600):
                    signals += a.put(b, 1, None) == OK
                require(b.progress() >= 0, "progress answered a fault")
                code = a.put(b, 0, data)
            require(code == OK, f"put answered {code}")
            until(lambda turn=turn: b.poll(a, 0) == turn + 1, [a, b], "the put")  # type: ignore[misc]
            require(bool((target[: len(data)] == data).all()), "bytes differ")
        until(lambda: b.poll(a, 1) == signals, [a, b], f"{signals} signals")


def put_between_waiting_signals(subject: Subject, call: Driver) -> None:
    """Signals that wait before a put and signals that come behind it keep their places."""
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, 1 << 20)
        a.begin(1)
        b.begin(1)
        before = behind = room = 0
        for _ in range(3):
            # How many signals fit in all settles only after the connection has been full.
            room = 0
            while room < 200_000 and a.put(b, 1, None) == OK:
                room += 1
            before += room
            until(lambda n=before: b.poll(a, 1) == n, [a, b], f"{before} signals")  # type: ignore[misc]
        for turn, fewer in enumerate((1, 100, 300, 200)):
            before += sum(a.put(b, 1, None) == OK for _ in range(room - fewer))
            data = noise(1 << 20, fewer)
            sent = [a.put(b, 0, data)]
            behind += sum(a.put(b, 2, None) == OK for _ in range(200))

            def finished(
                data: Bytes = data, sent: list[int] = sent, want: tuple[int, ...] = (turn + 1, before, behind)
            ) -> bool:
                if sent[0] == AGAIN:
                    sent[0] = a.put(b, 0, data)
                return sent[0] == OK and tuple(b.poll(a, channel) for channel in range(3)) == want

            until(finished, [a, b], f"a put between {before} signals before it and {behind} behind it, in all")
            require(bool((target == data).all()), "bytes differ")


def later_call_is_held_back(subject: Subject, call: Driver) -> None:
    """Frames of a later call neither land nor count before BEGIN of that call, and then do."""
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, 100_000)
        a.begin(1)
        b.begin(1)
        deliver(a, b, 0, noise(10, 1))
        a.begin(2, 99)
        data = noise(90_000, 2)
        before = target.copy()
        sent = [AGAIN]
        for _ in range(200):
            if sent[0] == AGAIN:
                sent[0] = a.put(b, 0, data)
            require(b.progress() >= 0, "progress answered a fault")
            require(b.poll(a, 0) == 1, "an arrival of a later call was counted")
        require(bool((target == before).all()), "bytes of a later call landed")
        require(b.flush() == OK, "flush with a later call's frames waiting")
        b.begin(2, 99)

        def finished() -> bool:
            if sent[0] == AGAIN:
                sent[0] = a.put(b, 0, data)
            return b.poll(a, 0) == 2

        until(finished, [a, b], "what was held back")
        require(bool((target[:90_000] == data).all()), "bytes differ")


def earlier_signal_counts(subject: Subject, call: Driver) -> None:
    """A signal of an earlier call, a credit returned late, counts when it comes."""
    with mesh(subject, 2, call) as (a, b):
        a.begin(1, 5)
        b.begin(1, 5)
        b.begin(2, 6)
        require(a.put(b, 1, None) == OK, "a signal was not accepted")
        until(lambda: b.poll(a, 1) == 1, [a, b], "a late signal")


def signatures_are_compared(subject: Subject, call: Driver) -> None:
    """Two ranks that ask for different things in one call find out before anything lands."""
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, 1000)
        a.begin(3, 111)
        b.begin(3, 222)
        a.put(b, 0, noise(1000))
        until_fault(lambda: _progress_behind(a, b), Fault.MISMATCH, "different signatures")
        until_fault(lambda: b.poll(a), Fault.MISMATCH, "poll after a mismatch")
        require(not target.any(), "bytes landed in spite of different signatures")


def bounds_are_checked(subject: Subject, call: Driver) -> None:
    """A put that would write outside a buffer of the receiver writes nothing and is a fault there."""
    large = (1 << 63) - 1
    source = noise(4096)
    cases = [
        (0, 990, 11),
        (0, 1001, 1),
        (0, -1, 2),
        (0, large, 4096),
        (0, large - 100, 101),
        (1, 0, 1),
        (N_BUFFERS, 0, 1),
        (-1, 0, 1),
        (large, 0, 1),
    ]
    for buffer, offset, nbytes in cases:
        with mesh(subject, 2, call) as (a, b):
            target = b.own(0, 1000)
            a.begin(1)
            b.begin(1)
            code = a.put_raw(b, 0, address(source), buffer, offset, nbytes)
            if code >= 0:
                text = f"{nbytes} bytes at offset {offset} of buffer {buffer}"
                until_fault(lambda a=a, b=b: _progress_behind(a, b), Fault.PROTOCOL, text)  # type: ignore[misc]
            require(not target.any(), "bytes landed")
            require(b.poll(a) <= 0, "the put was counted")


def counts_above_2_32(subject: Subject, call: Driver) -> None:
    """A count is not cut to 32 bits: 2**32 + 8 bytes do not pass for 8."""
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, 1000)
        a.begin(1)
        b.begin(1)
        source = np.zeros((1 << 32) + 8, np.uint8)  # untouched: takes no memory until it is read, piece by piece
        require(a.put(b, 0, source) == AGAIN, "4 GiB were accepted at once")
        until_fault(lambda: _progress_behind(a, b), Fault.PROTOCOL, "a count above 2**32 into 1000 bytes")
        require(not target.any(), "bytes landed")


def nothing_lands_after_flush(subject: Subject, call: Driver) -> None:
    """When a call has ended its buffers are the user's: payload that comes late is a fault."""
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, 1000)
        a.begin(1)
        b.begin(1)
        require(b.flush() == OK, "flush of an idle end")
        a.put(b, 0, noise(1000))
        until_fault(lambda: _progress_behind(a, b), Fault.PROTOCOL, "payload after the end of the call")
        require(not target.any(), "bytes landed after the end of the call")


def flush_waits(subject: Subject, call: Driver) -> None:
    """FLUSH answers AGAIN while something that was accepted has not left."""
    with mesh(subject, 2, call) as (a, b):
        b.own(0, 16 << 20)
        a.begin(1)
        b.begin(1)
        data = noise(16 << 20)
        require(a.put(b, 0, data) == AGAIN, "16 MiB to a peer that does not receive were accepted at once")
        require(a.put(b, 1, None) == OK, "a signal was not queued")
        require(a.flush() == AGAIN, "flush answered OK with a signal waiting behind a full socket")
        until(lambda: a.put(b, 0, data) == OK, [a, b], "the put")
        until(lambda: a.flush() == OK, [b], "flush")
        until(lambda: b.poll(a, 1) == 1, [b], "what flush said had left")


def dead_peer_is_named(subject: Subject, call: Driver) -> None:
    """After a peer's process dies, waiting for it and sending to it are faults; others' connections go on."""
    with mesh(subject, 3, call) as (a, b, c):
        b.own(0, 8 << 20)
        for end in (a, b, c):
            end.begin(1)
        deliver(a, b, 0, noise(100))
        a.put(b, 0, noise(8 << 20))  # in the middle of a frame
        _crash(subject, a)
        until_fault(lambda: _progress_from(b, a), Fault.PEER_LOST, "the end of a peer in the middle of a frame")
        until_fault(lambda: _progress_from(c, a), Fault.PEER_LOST, "the end of an idle peer")
        require(b.poll(a) == -Fault.PEER_LOST, "poll of a dead peer")
        require(b.put_raw(a, 0, address(noise(8)), 0, 0, 8) == -Fault.PEER_LOST, "put to a dead peer")
        require(c.put(b, 1, None) == OK, "a connection between two others broke")
        for _ in range(ROUNDS):
            if b.poll(c, 1) == 1:
                break
            _progress_from(c, b)
            _progress_from(b, c)
        require(b.poll(c, 1) == 1, "a connection between two others broke")


def leaving_is_no_fault_until_the_next_call(subject: Subject, call: Driver) -> None:
    """What a peer sent before it left arrives; a credit to it is dropped; only a later call is a fault."""
    with mesh(subject, 2, call) as (a, b):
        target = b.own(0, 100_000)
        a.begin(1)
        b.begin(1)
        data = noise(100_000)
        until(lambda: a.put(b, 0, data) == OK, [a, b], "a put")
        until(lambda: a.flush() == OK, [a, b], "flush")
        if subject.leave is not None:
            subject.leave(a.channels)
        until(lambda: b.poll(a) == 1, [b], "what was sent before leaving")
        require(bool((target == data).all()), "bytes differ")
        for _ in range(100):
            require(b.put(a, 1, None) == OK, "a credit to a peer that has left")
            require(b.progress() >= 0, "a peer that left in order is a fault in the call that it finished")
            require(b.poll(a) == 1, "arrivals changed")
        require(b.flush() == OK, "flush after a peer left")
        b.begin(2)
        until_fault(lambda: min(b.progress(), 0) or b.poll(a), Fault.PEER_LOST, "a call that the peer will not join")


def _progress_behind(sender: Endpoint, receiver: Endpoint) -> int:
    """The receiver's progress, after the sender has let out what waits there."""
    sender.progress()
    return receiver.progress()


def _progress_from(end: Endpoint, peer: Endpoint) -> int:
    row = end.channels.table[peer.rank]
    return end.call(int(row[Slot.PROGRESS]), int(row[Slot.STATE]))


def _crash(subject: Subject, end: Endpoint) -> None:
    if subject.crash is not None:
        subject.crash(end.channels)


Check = Callable[[Subject, Driver], None]


def _framed(subject: Subject) -> bool:
    return subject.framed


def _streamed(subject: Subject) -> bool:
    return subject.framed and subject.streamed


FRAMED_CHECKS: Final[tuple[tuple[Check, Callable[[Subject], bool]], ...]] = (
    (again_keeps_the_put, _streamed),
    (many_signals_behind_a_full_socket, _streamed),
    (accepted_signals_leave_by_progress, _framed),
    (signals_survive_a_cut_behind_a_put, _streamed),
    (put_between_waiting_signals, _streamed),
    (later_call_is_held_back, _framed),
    (earlier_signal_counts, _framed),
    (signatures_are_compared, _framed),
    (bounds_are_checked, _framed),
    (counts_above_2_32, _framed),
    (nothing_lands_after_flush, _framed),
    (flush_waits, _streamed),
    (dead_peer_is_named, lambda subject: subject.crash is not None),
    (leaving_is_no_fault_until_the_next_call, lambda subject: subject.leave is not None),
)
"""Checks, and which subjects they apply to."""
