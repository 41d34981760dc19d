"""The verbs transport's own rules, over an imitation of a card: copies, credits, calls, rails, faults and leaving."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_verbs import SLOT_NBYTES, Fabric, Pair, Request

from gfkernels.errors import MismatchError, PeerLostError, TransportError
from gfkernels.transport import framed as c
from gfkernels.transport.conformance_rig import Endpoint, compiled, deliver, noise, until, until_fault
from gfkernels.transport.table import AGAIN, OK, Fault
from gfkernels.transport.verbs import layout as v
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.channels import VerbsChannels

_PAYLOAD = SLOT_NBYTES - c.HEADER_NBYTES


@contextmanager
def _ends(
    size: int = 2, *, registered: tuple[int, ...] = (), n_rails: int = 1, fabric: Fabric | None = None
) -> Iterator[list[Endpoint]]:
    fabric = fabric or Fabric()
    ends = [
        Endpoint(rank, channels, compiled)
        for rank, channels in enumerate(fabric.mesh(size, n_rails=n_rails, registered=registered))
    ]
    yield ends
    for end in ends:
        end.check_guards()
        _channels(end).close(timeout_s=5, leave=True)
    assert not fabric.sins, fabric.sins


def _channels(end: Endpoint) -> VerbsChannels:
    assert isinstance(end.channels, VerbsChannels)
    return end.channels


def _word(end: Endpoint, peer: Endpoint, word: int) -> int:
    return int(_channels(end).links[peer.rank][0][word // 8])


@pytest.mark.parametrize(("registered", "straight"), [((0, 1), True), ((0,), False), ((1,), False), ((), False)])
def test_only_memory_registered_at_both_ends_is_written_straight(registered: tuple[int, ...], straight: bool) -> None:
    fabric = Fabric()
    with _ends(registered=registered, fabric=fabric) as (a, b):
        target = b.own(0, 3 << 20)
        a.begin(1)
        b.begin(1)
        data = noise((3 << 20) - 5)
        deliver(a, b, 0, data, 0, 3)
        assert (target[3:-2] == data).all()
        assert fabric.n_written == (len(data) if straight else 0)


def test_a_frame_is_used_where_copying_is_cheaper() -> None:
    fabric = Fabric()
    with _ends(registered=(0, 1), fabric=fabric) as (a, b):
        b.own(0, 1 << 20)
        a.begin(1)
        b.begin(1)
        deliver(a, b, 0, noise(_PAYLOAD))
        assert fabric.n_written == 0
        deliver(a, b, 0, noise(_PAYLOAD + 1))
        assert fabric.n_written == _PAYLOAD + 1


def test_requests_are_posted_together() -> None:
    fabric = Fabric()
    with _ends(fabric=fabric) as (a, b):
        a.begin(1)
        b.begin(1)
        n = w.BATCH - 1  # for one more the peer would return credits
        for _ in range(n):
            assert a.put(b, 1, None) == OK
        until(lambda: b.poll(a, 1) == n, [a, b], "signals")
        assert (fabric.n_posts, fabric.n_requests) == (1, n)


def test_a_sender_stops_at_the_receives_that_are_posted() -> None:
    with _ends() as (a, b):
        a.begin(1)
        b.begin(1)
        accepted = 0
        for _ in range(1000):
            accepted += a.put(b, 1, None) == OK
            assert a.progress() >= 0
        assert accepted == w.DEPTH - w.RESERVE
        until(lambda: b.poll(a, 1) == accepted, [b], "what was accepted")
        until(lambda: a.put(b, 1, None) == OK, [a, b], "room again")


def test_two_full_links_do_not_block_one_another() -> None:
    with _ends() as ends:
        a, b = ends
        for end in ends:
            end.begin(1)
        sent = [0, 0]
        for _ in range(20_000):
            for end, peer in ((a, b), (b, a)):
                sent[end.rank] += end.put(peer, 2, None) == OK
        until(lambda: a.poll(b, 2) == sent[1] and b.poll(a, 2) == sent[0], ends, "all signals")
        assert min(sent) > 5000


def test_a_rank_that_runs_ahead_is_held() -> None:
    """Messages of later calls keep their receives; the present call goes on all the same."""
    with _ends() as (a, b):
        target = b.own(0, 1000)
        a.begin(1)
        b.begin(1)
        ahead = 0
        for call in range(2, 100):
            a.begin(call)
            for _ in range(3):
                ahead += a.put(b, 1, None) == OK
                a.progress()
                b.progress()
        assert ahead == w.DEPTH - w.RESERVE
        assert b.poll(a, 1) == 0
        # Towards the rank that is ahead what is left of the call still moves: its credits are not held.
        for _ in range(100):
            until(lambda: b.put(a, 1, None) == OK, [a, b], "a late credit")
        b.begin(99)
        until(lambda: b.poll(a, 1) == ahead, [a, b], "what was held")
        assert not target.any()


def test_call_numbers_wrap_in_the_immediate() -> None:
    with _ends(registered=(0, 1)) as (a, b):
        target = b.own(0, 100_000)
        for call in range(w.CALL_PERIOD - 3, w.CALL_PERIOD + 3):
            data = noise(100_000, call)
            a.begin(call)
            for _ in range(3):
                assert a.put(b, 1, None) == OK
            for _ in range(50):
                assert a.progress() >= 0
                assert b.progress() >= 0
            b.begin(call)
            deliver(a, b, 0, data)
            assert (target == data).all()
        assert b.poll(a, 1) == 18


def test_several_rails_share_the_lanes() -> None:
    fabric = Fabric()
    used: set[int] = set()
    fabric.kill_request = lambda pair, request: used.add(pair.number) or 0  # type: ignore[func-returns-value]
    with _ends(registered=(0, 1), n_rails=2, fabric=fabric) as (a, b):
        target = b.own(0, 400_000)
        a.begin(1)
        b.begin(1)
        for turn in range(10):
            data = noise(200_000, turn)
            deliver(a, b, 0, data, 0, 0)
            deliver(a, b, 2, data, 0, 200_000)
            assert (target[:200_000] == data).all()
            assert (target[200_000:] == data).all()
        assert len(used) == 4
        assert a.put(b, -1, noise(10)) == -Fault.PROTOCOL, "a put of no channel has no place among rails"


@pytest.mark.parametrize(
    ("status", "fault", "error", "text"),
    [
        (v.STATUS_RETRY_EXCEEDED, Fault.PEER_LOST, PeerLostError, "rank 1 over RDMA: .*status 12: no answer"),
        (v.STATUS_RNR_RETRY_EXCEEDED, Fault.PEER_LOST, PeerLostError, "status 13"),
        (10, Fault.SYSTEM, TransportError, "status 10: remote access error.*vendor code 0x77"),
        (2, Fault.SYSTEM, TransportError, "status 2: .*port is down"),
        (22, Fault.SYSTEM, TransportError, "status 22"),
    ],
)
def test_a_failed_request_names_peer_status_and_vendor(
    status: int, fault: Fault, error: type[TransportError], text: str
) -> None:
    fabric = Fabric()
    hits: list[int] = []

    def fail_the_fifth(pair: Pair, request: Request) -> int:
        hits.append(pair.number)
        return status if len(hits) == 5 else 0

    fabric.kill_request = fail_the_fifth
    with _ends(fabric=fabric) as (a, b):
        a.begin(1)
        b.begin(1)
        for _ in range(20):
            a.put(b, 1, None)
        until_fault(a.progress, fault, "a failed request")
        assert len(hits) == 5
        assert a.put(b, 1, None) == -fault
        assert a.poll(b, 1) == -fault
        assert _channels(a).fault(1) is fault
        with pytest.raises(error, match=text):
            raise _channels(a).error(1)


def test_a_dead_peer_is_lost_and_others_go_on() -> None:
    fabric = Fabric()
    with _ends(3, fabric=fabric) as (a, b, c):
        for end in (a, b, c):
            end.begin(1)
        fabric.kill(_channels(b))
        a.put(b, 1, None)
        until_fault(a.progress, Fault.PEER_LOST, "a dead peer")
        assert isinstance(_channels(a).error(1), PeerLostError)
        assert _channels(a).fault(2) is None
        assert a.put(c, 1, None) == OK
        for _ in range(100):
            # As the engine does for peers that are not at fault.
            _progress(a, c)
            _progress(c, a)
        assert c.poll(a, 1) == 1


def _progress(end: Endpoint, peer: Endpoint) -> int:
    row = end.channels.table[peer.rank]
    return compiled(int(row[4]), int(row[0]))


@pytest.mark.parametrize(
    ("word", "value", "fault", "text"),
    [
        (c.MAGIC, 5, Fault.PROTOCOL, "no frame"),
        (c.SIGNATURE, 5, Fault.MISMATCH, "something else in the same call"),
        (c.CHANNEL, 77, Fault.PROTOCOL, "channel 77"),
        (c.BUFFER, 9, Fault.PROTOCOL, "buffer 9"),
        (c.OFFSET, -3, Fault.PROTOCOL, "wrote up to byte"),
        (c.OFFSET, 1 << 62, Fault.PROTOCOL, "wrote up to byte"),
        (c.NBYTES, 1001, Fault.PROTOCOL, "wrote up to byte"),
        (c.NBYTES, -1, Fault.PROTOCOL, "wrote up to byte"),
    ],
)
def test_a_frame_is_not_believed(word: int, value: int, fault: Fault, text: str) -> None:
    fabric = Fabric(inline_nbytes=0)
    changed = []

    def change(pair: Pair, request: Request) -> int:
        if request.nbytes > c.HEADER_NBYTES:
            changed.append(request)
            ctypes.c_int64.from_address(request.src + word).value = value
        return 0

    fabric.kill_request = change
    with _ends(fabric=fabric) as (a, b):
        target = b.own(0, 1000)
        a.begin(1)
        b.begin(1)
        assert a.put(b, 0, noise(1000)) == OK

        def both() -> int:
            a.progress()
            return b.progress()

        until_fault(both, fault, text)
        assert changed
        assert not target.any()
        with pytest.raises(MismatchError if fault is Fault.MISMATCH else TransportError, match=text):
            raise _channels(b).error(0)
        if fault is Fault.MISMATCH:
            assert _channels(b).mismatched_call(0) == 1


def test_a_write_past_the_end_is_refused_before_it_is_sent() -> None:
    fabric = Fabric()
    with _ends(registered=(0, 1), fabric=fabric) as (a, b):
        b.own(0, 100_000)
        a.begin(1)
        b.begin(1)
        deliver(a, b, 0, noise(50_000))
        written = fabric.n_written
        until_fault(lambda: a.put(b, 0, noise(50_001), 0, 50_000), Fault.PROTOCOL, "a write past the end")
        assert "has announced a buffer of 100000 bytes" in _channels(a).explain(1)
        assert fabric.n_written == written


def test_ranks_that_disagree_find_out_before_anything_is_written() -> None:
    """Also where one waits to write straight and the other has nothing to send."""
    fabric = Fabric()
    with _ends(registered=(0, 1), fabric=fabric) as (a, b):
        target = b.own(0, 100_000)
        a.begin(4, 111)
        b.begin(4, 222)

        def step() -> int:
            assert a.put(b, 0, noise(100_000)) in (AGAIN, -Fault.MISMATCH)
            return b.progress()

        until_fault(step, Fault.MISMATCH, "different signatures")
        assert not target.any()
        assert fabric.n_written == 0


def test_what_is_owed_to_a_peer_that_left_is_dropped() -> None:
    with _ends(registered=(0, 1)) as (a, b):
        target = b.own(0, 1 << 20)
        a.begin(1)
        b.begin(1)
        data = noise(1 << 20)
        until(lambda: a.put(b, 0, data) == OK, [a, b], "a put")
        _channels(a).close(leave=True)
        until(lambda: b.poll(a) == 1, [b], "what was sent before leaving")
        assert (target == data).all()
        for _ in range(3 * w.DEPTH):
            assert b.put(a, 1, None) == OK
            assert b.progress() >= 0
        assert b.flush() == OK
        b.begin(2)
        until_fault(lambda: b.put(a, 1, None), Fault.PEER_LOST, "a call that the peer will not join")
        assert "left after call 1" in _channels(b).explain(0)
        a.channels.table[:] = 0


def test_leaving_after_a_peer_waits_for_nothing() -> None:
    fabric = Fabric()
    for end in fabric.mesh(3):
        since = time.monotonic()
        end.close(timeout_s=60)
        assert time.monotonic() - since < 30, "a card that is gone was waited for"


def test_probes_reach_everybody_and_silence_is_named() -> None:
    fabric = Fabric()
    ends = fabric.mesh(2, n_rails=2)
    assert ends[0].probe(0.05) == [1], "the peer has not probed yet"
    assert ends[1].probe(5) == []
    for end in ends:
        end.close()
    assert not fabric.sins


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(seed: int) -> None:
    """Three ranks in several calls, any sizes and channels, some memory registered, two rails: all bytes, in order."""
    rng = random.Random(seed)
    n_rails = 1 + seed % 2
    fabric = Fabric(seed, inline_nbytes=rng.choice([0, 64, 128]), most_nbytes=rng.choice([10_000, 1 << 20]))
    with _ends(3, registered=tuple(r for r in range(3) if rng.random() < 0.7), n_rails=n_rails, fabric=fabric) as ends:
        size = 200_000
        targets = {(end.rank, buffer): end.own(buffer, 3 * size) for end in ends for buffer in (0, 1)}
        counts: dict[tuple[int, int, int], int] = {}
        for call in range(1, 6):
            for target in targets.values():
                target[:] = 0
            expected = {key: target.copy() for key, target in targets.items()}
            todo = []
            for end in ends:
                end.begin(call)
                for peer in ends:
                    if peer is end:
                        continue
                    for buffer in (0, 1):
                        # A place of its own for every pair of ranks, so that the order among senders is free.
                        data = noise(rng.choice([1, 7, 100, 9000, size]), rng.randrange(1000))
                        todo.append((end, peer, 2 * buffer, data, buffer, size * end.rank))
                        expected[peer.rank, buffer][size * end.rank :][: len(data)] = data
            while todo:
                index = rng.randrange(len(todo))
                end, peer, channel, data, buffer, offset = todo[index]
                code = end.put(peer, channel, data, buffer, offset)
                assert code in (OK, AGAIN)
                if code == OK:
                    del todo[index]
                    key = (peer.rank, end.rank, channel)
                    counts[key] = counts.get(key, 0) + 1
                rng.choice(ends).progress()
            for (to, source, channel), count in counts.items():
                until(
                    lambda to=to, source=source, channel=channel, count=count: (  # type: ignore[misc]
                        ends[to].poll(ends[source], channel) == count
                    ),
                    ends,
                    f"{count} arrivals at {to} from {source}",
                )
            for place, target in targets.items():
                assert (target == expected[place]).all()
            for end in ends:
                until(lambda end=end: end.flush() == OK, ends, "flush")  # type: ignore[misc]
