"""In the guest: what goes wrong between connected ranks, and what each is told; each fault is seen to be hit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from guest_rig import QUICK, endpoint, finish, main, open_and_connect, run_ranks, wait_for

from gfkernels.errors import ConnectError, PeerLostError, UnavailableError
from gfkernels.transport.conformance_rig import Endpoint, noise
from gfkernels.transport.meeting import Exchange
from gfkernels.transport.table import AGAIN, Fault
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.channels import VerbsChannels
from gfkernels.transport.verbs.connect import connect
from gfkernels.transport.verbs.events import events
from gfkernels.transport.verbs.rail import Rail, close_rails, open_rails

TIMEOUT_S = 60.0


def _until_fault(me: Endpoint, peer: int, ends: VerbsChannels) -> float:
    """Signals `peer` until that fails; seconds."""
    other = Endpoint(peer, ends, me.call)

    def step() -> None:
        me.put(other, 1, None)
        me.progress()
        time.sleep(0.01)

    return wait_for(lambda: ends.fault(peer) is not None, step, TIMEOUT_S, "a fault")


def a_killed_peer() -> None:
    """SIGKILL: both others name it, and go on to close in order."""

    def part(rank: int, exchange: Exchange) -> None:
        ends, rails = open_and_connect(rank, 3, exchange)
        me = endpoint(ends)
        me.begin(1)
        exchange(None)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        took = _until_fault(me, 1, ends)
        error = ends.error(1)
        print(f"rank {rank}: {error} after {took:.2f} s", flush=True)
        assert isinstance(error, PeerLostError) and error.rank == 1 and "rank 1" in str(error)
        assert ends.fault(2 - rank) is None
        finish(ends, rails, leave=False)

    run_ranks(part, 3, killed=(1,))


def a_bad_key() -> None:
    """A frame is written with a key that the peer never gave."""

    def part(rank: int, exchange: Exchange) -> None:
        ends, rails = open_and_connect(rank, 2, exchange)
        me = endpoint(ends)
        exchange(None)
        if rank == 0:
            ends.links[1][0][w.FAR_FRAMES_RKEY // 8] ^= 0x5500
            me.begin(1)
            took = _until_fault(me, 1, ends)
            print(f"rank 0: {ends.error(1)} after {took:.2f} s", flush=True)
            assert ends.fault(1) is Fault.SYSTEM and "remote access error" in str(ends.error(1))
        exchange(None)
        finish(ends, rails, leave=False)

    run_ranks(part, 2)


def memory_that_is_no_longer_registered() -> None:
    """The peer takes its registration back in the middle of a call."""

    def part(rank: int, exchange: Exchange) -> None:
        ends, rails = open_and_connect(rank, 2, exchange)
        device, me = rails[0].device, endpoint(ends)
        other = Endpoint(1 - rank, ends, me.call)
        own, source = me.own(0, 1 << 20), noise(1 << 20)
        held = [device.register(int(array.ctypes.data), array.nbytes) for array in (own, source)]
        me.begin(1)
        if rank == 0:
            # The first message asks where the buffer is; the second finds it gone.
            wait_for(lambda: me.put(other, 1, source[:65536]) != AGAIN, me.progress, TIMEOUT_S, "a put")
            exchange("written")
            exchange("closed")
            code = wait_for(
                lambda: me.put(other, 1, source) < 0 or ends.fault(1) is not None, me.progress, TIMEOUT_S, "a fault"
            )
            print(f"rank 0: {ends.error(1)} after {code:.2f} s", flush=True)
            assert "remote access error" in str(ends.error(1))
        else:
            wait_for(lambda: me.poll(other, 1) == 1, me.progress, TIMEOUT_S, "an arrival")
            exchange("written")
            held[0].close()
            exchange("closed")
        exchange("seen")
        finish(ends, rails, leave=False)

    run_ranks(part, 2)


def a_completion_queue_that_is_too_small() -> None:
    """The card says so as an event, and completions are lost: which is why it is sized for everything."""

    def part(rank: int, exchange: Exchange) -> None:
        settings = replace(QUICK, cq_entries=8 if rank == 0 else None)
        ends, rails = open_and_connect(rank, 2, exchange, settings)
        me = endpoint(ends)
        other = Endpoint(1 - rank, ends, me.call)
        me.begin(1)
        exchange(None)
        if rank == 1:
            for _ in range(w.DEPTH - w.RESERVE - 4):
                me.put(other, 1, None)
                if me.progress() < 0:
                    break
        exchange(None)
        if rank == 0:
            device = rails[0].device
            assert device.async_fd >= 0 and not os.get_blocking(device.async_fd)
            seen: list[Any] = []
            wait_for(lambda: bool(seen), lambda: seen.extend(events(device)), TIMEOUT_S, "an event")
            print(f"rank 0: {seen}", flush=True)
            assert seen[0].is_fatal and "completion queue ran over" in seen[0].text
        exchange(None)
        finish(ends, rails, leave=False)

    run_ranks(part, 2)


def ends_with_different_mtus() -> None:
    """Shows in the first message that is longer than the smaller one; the probe is shorter than any."""

    def part(rank: int, exchange: Exchange) -> None:
        if rank == 0:
            real = Rail.path
            Rail.path = lambda self, there: replace(real(self, there), mtu=1)  # type: ignore[method-assign]
        ends, rails = open_and_connect(rank, 2, exchange)
        me = endpoint(ends)
        other = Endpoint(1 - rank, ends, me.call)
        me.own(0, 8192)
        me.begin(1)
        exchange(None)
        source = noise(8192)
        me.put(other, 1, source)
        took = wait_for(lambda: ends.fault(1 - rank) is not None, me.progress, TIMEOUT_S, "a fault")
        print(f"rank {rank}: {ends.error(1 - rank)} after {took:.2f} s", flush=True)
        exchange(None)
        finish(ends, rails, leave=False)

    run_ranks(part, 2)


def a_link_that_goes_down() -> None:
    """An event for the port, an error for what is under way."""

    def part(rank: int, exchange: Exchange) -> None:
        ends, rails = open_and_connect(rank, 2, exchange)
        me = endpoint(ends)
        me.begin(1)
        exchange(None)
        if rank == 0:
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        exchange(None)
        took = _until_fault(me, 1 - rank, ends)
        print(f"rank {rank}: {ends.error(1 - rank)} after {took:.2f} s", flush=True)
        seen = [event.text for event in events(rails[0].device)]
        print(f"rank {rank}: {seen}", flush=True)
        assert any("a port is down" in text for text in seen)
        exchange(None)
        if rank == 0:
            subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
            subprocess.run(["ip", "addr", "replace", "10.77.0.1/24", "dev", "eth0"], check=True)
        finish(ends, rails, leave=False)

    run_ranks(part, 2)
    deadline = time.monotonic() + 10
    while True:
        try:
            close_rails(open_rails(QUICK))
            return
        except UnavailableError as error:
            assert time.monotonic() < deadline, error
            time.sleep(0.2)


def _refused(rank: int, size: int, exchange: Exchange, settings: Any, **options: Any) -> Exception:
    rails: Any
    try:
        rails = open_rails(settings)
    except UnavailableError as error:
        rails = error
    try:
        connect(rank, size, exchange=exchange, rails=rails, settings=settings, timeout_s=3.0, **options)
    except (ConnectError, UnavailableError) as error:
        return error
    finally:
        if not isinstance(rails, UnavailableError):
            close_rails(rails)
    raise AssertionError("connected")


def one_rank_without_a_device() -> None:
    """It raises UnavailableError, and the others learn of it at once."""

    def part(rank: int, exchange: Exchange) -> None:
        settings = replace(QUICK, device="mlx5_7") if rank == 2 else QUICK
        error = _refused(rank, 3, exchange, settings)
        print(f"rank {rank}: {error}", flush=True)
        assert isinstance(error, UnavailableError if rank == 2 else ConnectError)
        assert "mlx5_7" in str(error) and (rank == 2 or "rank 2 failed to use RDMA" in str(error))

    run_ranks(part, 3)


def another_version() -> None:
    """All ranks name both versions."""

    def part(rank: int, exchange: Exchange) -> None:
        def tampered(value: Any) -> list[Any]:
            if rank == 1 and "version" in value.get("value", {}):
                value["value"]["version"] = 99
            return exchange(value)

        error = _refused(rank, 2, tampered, QUICK)
        assert isinstance(error, ConnectError) and f"99, not {w.VERSION}" in str(error), error

    run_ranks(part, 2)


def a_completion_queue_larger_than_the_card_has() -> None:
    """Refused with the limit, before anything is connected."""

    def part(rank: int, exchange: Exchange) -> None:
        error = _refused(rank, 2, exchange, replace(QUICK, cq_entries=1 << 29))
        assert isinstance(error, UnavailableError) and "has at most" in str(error), error

    run_ranks(part, 2)


def a_peer_that_cannot_be_reached() -> None:
    """Its address leads nowhere: the probe names both ends."""

    def part(rank: int, exchange: Exchange) -> None:
        def astray(value: Any) -> list[Any]:
            if rank == 1 and "rails" in (value.get("value") or {}):
                value["value"]["rails"][0]["gid"] = "0000:0000:0000:0000:0000:ffff:0a4d:0063"
            return exchange(value)

        error = _refused(rank, 2, astray, QUICK)
        print(f"rank {rank}: {error}", flush=True)
        assert isinstance(error, ConnectError)
        if rank == 0:
            for text in ("rank 0 does not reach rank 1", "rxe0:1", "0a4d:0063", "UDP port 4791"):
                assert text in str(error)

    run_ranks(part, 2)


if __name__ == "__main__":
    sys.exit(
        main(
            a_killed_peer,
            a_bad_key,
            memory_that_is_no_longer_registered,
            a_completion_queue_that_is_too_small,
            ends_with_different_mtus,
            one_rank_without_a_device,
            another_version,
            a_completion_queue_larger_than_the_card_has,
            a_peer_that_cannot_be_reached,
            a_link_that_goes_down,
        )
    )
