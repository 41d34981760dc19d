"""In the guest: ranks as processes, both ways to post: signals, frames, and writes into registered memory."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
from guest_rig import QUICK, descriptors, endpoint, finish, main, open_and_connect, run_ranks, wait_for

from gfkernels.transport.conformance_rig import Bytes, Endpoint, noise
from gfkernels.transport.meeting import Exchange
from gfkernels.transport.table import AGAIN, OK
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.settings import Settings
from gfkernels.types import N_CHANNELS

SIZES = (1, 8, 4096, 8192, 8193, 65536, 300_001)
TIMEOUT_S = 120.0


def _progress(me: Endpoint, others: list[Endpoint]) -> None:
    code = me.progress()
    assert code >= 0, (code, [me.channels.explain(other.rank) for other in others])  # type: ignore[attr-defined]


def _move(me: Endpoint, others: list[Endpoint], call: int, sources: list[Bytes], slots: list[int]) -> None:
    """Puts `sources[peer]` into every peer's buffer 0 at this rank's slot, and waits for as much from each."""
    channel, count = call % N_CHANNELS, (call - 1) // N_CHANNELS + 1
    if channel == 0:
        count = call // N_CHANNELS
    pending = {other.rank: AGAIN for other in others}

    def step() -> None:
        for other in others:
            if pending[other.rank] == AGAIN:
                code = me.put(other, channel, sources[other.rank], 0, slots[me.rank])
                assert code >= 0, me.channels.error(other.rank)  # type: ignore[attr-defined]
                pending[other.rank] = code
        _progress(me, others)

    def done() -> bool:
        return all(code == OK for code in pending.values()) and all(
            me.poll(other, channel) == count for other in others
        )

    wait_for(done, step, TIMEOUT_S, f"message {call}")


def exercise(rank: int, size: int, exchange: Exchange, settings: Settings, *, register: bool) -> None:
    """All that a rank can do with its peers: messages of many lengths, credits, leaving, and nothing left open."""
    before = descriptors()
    ends, rails = open_and_connect(rank, size, exchange, settings)
    assert ends.compiled != settings.reference
    me = endpoint(ends)
    others = [Endpoint(peer, ends, me.call) for peer in range(size) if peer != rank]
    for call, nbytes in enumerate(SIZES, 1):
        own = me.own(0, size * nbytes)
        sources = [noise(nbytes, seed=100 * rank + peer) for peer in range(size)]
        held = []
        if register:
            arrays = (own, *sources)
            held = [rail.device.register(int(a.ctypes.data), a.nbytes) for rail in rails for a in arrays]
        me.begin(call)
        _move(me, others, call, sources, [i * nbytes for i in range(size)])
        for other in others:
            got = own[other.rank * nbytes : (other.rank + 1) * nbytes]
            assert (got == noise(nbytes, seed=100 * other.rank + rank)).all(), (rank, other.rank, nbytes)
        me.check_guards()
        wait_for(lambda: me.flush() == OK, me.progress, TIMEOUT_S, "flush")
        exchange(None)  # a peer's write may still be on its way
        for one in held:
            one.close()
    written = sum(int(words[w.POSTED // 8]) for links in ends.links.values() for words in links)
    print(f"rank {rank} of {size}: {written} requests", flush=True)
    before_signals = [me.poll(other, 3) for other in others]
    # Many signals: far more than there are receives, so credits must flow.
    me.begin(len(SIZES) + 1)
    sent = np.zeros(size, np.int64)

    def step() -> None:
        for other in others:
            if sent[other.rank] < 300 and me.put(other, 3, None) == OK:
                sent[other.rank] += 1
        _progress(me, others)

    def done() -> bool:
        arrived = [me.poll(other, 3) - first for other, first in zip(others, before_signals, strict=True)]
        return all(sent[other.rank] == 300 for other in others) and arrived == [300] * len(others)

    wait_for(done, step, TIMEOUT_S, "300 signals")
    finish(ends, rails)
    assert descriptors() == before, (before, descriptors())


def _scenario(size: int, settings: Settings, *, register: bool) -> None:
    run_ranks(lambda rank, exchange: exercise(rank, size, exchange, settings, register=register), size)


def two_ranks_frames() -> None:
    """Nothing is registered."""
    _scenario(2, QUICK, register=False)


def two_ranks_writes() -> None:
    """Long messages go straight into the peer's memory."""
    _scenario(2, QUICK, register=True)


def three_ranks_writes() -> None:
    """Several links share a completion queue."""
    _scenario(3, QUICK, register=True)


def two_ranks_through_pyverbs() -> None:
    """The same data path over the slow way."""
    _scenario(2, replace(QUICK, reference=True), register=True)


def mixed_ways() -> None:
    """What travels does not depend on how it is posted."""

    def part(rank: int, exchange: Exchange) -> None:
        exercise(rank, 3, exchange, replace(QUICK, reference=rank == 1), register=rank != 2)

    run_ranks(part, 3)


def two_rails() -> None:
    """Lanes are spread over two devices; for a guest that has them."""
    _scenario(2, replace(QUICK, device="rxe0,rxe1"), register=True)
    _scenario(2, replace(QUICK, device="rxe1:1,rxe0"), register=False)


def leaving_without_closing() -> None:
    """Ranks end with all open; their interpreters end in order."""

    def part(rank: int, exchange: Exchange) -> None:
        _LEFT_OPEN.append(open_and_connect(rank, 2, exchange))
        exchange(None)

    run_ranks(part, 2)


_LEFT_OPEN: list[object] = []


if __name__ == "__main__":
    everywhere = (two_ranks_frames, two_ranks_writes, three_ranks_writes, two_ranks_through_pyverbs, mixed_ways)
    sys.exit(main(*everywhere, leaving_without_closing, *([two_rails] if "two_rails" in sys.argv else [])))
