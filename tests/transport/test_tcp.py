"""TCP beyond the conformance suite: who is let in, what failures say, closing, forks, and addresses."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from meshes import SECRET, in_threads, tcp_mesh

from gfkernels.errors import ConnectError, MismatchError, PeerLostError
from gfkernels.transport import tcp_connect, tcp_frames
from gfkernels.transport.conformance_rig import Endpoint, compiled, deliver, noise, until_fault
from gfkernels.transport.meeting import Exchange
from gfkernels.transport.table import AGAIN, OK, Fault
from gfkernels.transport.tcp import TcpChannels, channels
from gfkernels.transport.tcp_connect import connect
from gfkernels.transport.tcp_handshake import Handshake, HandshakeError, Identity, as_client, as_server


@pytest.fixture
def pair() -> Iterator[tuple[TcpChannels, TcpChannels]]:
    a, b = tcp_mesh(2)
    yield a, b
    a.close(leave=False)
    b.close(leave=False)


def _close_all(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, TcpChannels):
            result.close(leave=False)


def test_size_one_needs_no_network() -> None:
    def exchange(_: object) -> list[Any]:
        raise AssertionError("nothing to exchange")

    alone = connect(0, 1, exchange=exchange, secret=SECRET)
    assert not alone.table.any()
    assert alone.block_fds == []
    alone.close()


def test_sockets_are_close_on_exec_and_prompt(pair: tuple[TcpChannels, TcpChannels]) -> None:
    for end in pair:
        assert end.fds == end.block_fds
        for sock in end.sockets.values():
            assert not os.get_inheritable(sock.fileno())
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getpeername()[0] == "127.0.0.1"
            assert not sock.getblocking()


def test_a_rank_with_another_secret_is_kept_out() -> None:
    def work(rank: int, exchange: Exchange) -> TcpChannels:
        return connect(rank, 2, exchange=exchange, secret=SECRET if rank == 0 else b"not it", timeout_s=1)

    results = in_threads(2, work)
    assert all(isinstance(r, ConnectError) for r in results), results
    assert "rank 1 did not connect to rank 0" in str(results[0])
    assert "rank 1 could not connect to rank 0" in str(results[1])
    assert "does not know the secret" in str(results[1])
    assert "GFKERNELS_INTERFACE" in str(results[1])


def test_strangers_that_are_silent_or_loud_delay_nobody() -> None:
    ports: list[int] = []
    strangers: list[socket.socket] = []

    def work(rank: int, exchange: Exchange) -> TcpChannels:
        def with_strangers(value: object) -> list[Any]:
            people = exchange(value)
            if rank == 1 and "port" in people[0]:
                for greeting in (
                    b"",
                    b"GET / HTTP/1.1\r\nHost: nobody and much more text, so that it is a hello\r\n\r\n" * 2,
                ):
                    ports.append(people[0]["port"])
                    strangers.append(socket.create_connection(("127.0.0.1", ports[0])))
                    strangers[-1].sendall(greeting)
            return people

        return connect(rank, 3, exchange=with_strangers, secret=SECRET, timeout_s=10)

    started = time.monotonic()
    results = in_threads(3, work)
    assert time.monotonic() - started < 8
    assert all(isinstance(r, TcpChannels) for r in results), results
    for stranger in strangers:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b"", "a stranger was told something"
        stranger.close()
    _close_all(results)


def test_a_port_that_nobody_answers_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]

        def exchange(value: Any) -> list[Any]:
            other = dict(value, port=port) if "port" in value else dict(value)
            return [other, value]

        with pytest.raises(
            ConnectError, match=rf"rank 1 could not connect to rank 0 in 0.3 s \(tried 127.0.0.1 port {port}"
        ):
            connect(1, 2, exchange=exchange, secret=SECRET, timeout_s=0.3)


def test_all_addresses_of_a_peer_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first address refuses, the second is silent, the third is right."""
    monkeypatch.setattr(tcp_connect, "_ATTEMPT_S", 0.2)
    stacks = iter(["one", "two"])
    monkeypatch.setattr(tcp_connect, "_network_stack", lambda: next(stacks))
    with socket.socket() as mute:
        mute.bind(("127.0.0.3", 0))

        def work(rank: int, exchange: Exchange) -> TcpChannels:
            own = ["127.0.0.2", "127.0.0.3", "127.0.0.1"] if rank == 0 else ["127.0.0.9"]

            def rewritten(value: object) -> list[Any]:
                return exchange(value)

            return connect(rank, 2, exchange=rewritten, secret=SECRET, addresses=own, timeout_s=10)

        results = in_threads(2, work)
    assert all(isinstance(r, TcpChannels) for r in results), results
    _close_all(results)


def test_hosts_without_an_address_are_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(value: Any) -> list[Any]:
        return [value, dict(value, stack="elsewhere")]

    with pytest.raises(ConnectError, match=r"rank 0 has no address that others could reach.*GFKERNELS_INTERFACE"):
        connect(0, 2, exchange=exchange, secret=SECRET)


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConnectError, match=r"rank 0 cannot listen on 203\.0\.113\.7"):
        connect(0, 2, exchange=lambda value: [value, value], secret=SECRET, bind="203.0.113.7")


def test_another_version_is_refused_by_name() -> None:
    def exchange(value: Any) -> list[Any]:
        return [value, dict(value, version=99)]

    with pytest.raises(ConnectError, match="rank 1 speaks version 99"):
        connect(0, 2, exchange=exchange, secret=SECRET)


def test_bind_is_used_at_both_ends() -> None:
    def work(rank: int, exchange: Exchange) -> TcpChannels:
        return connect(rank, 2, exchange=exchange, secret=SECRET, bind=f"127.0.0.{rank + 5}", timeout_s=10)

    results = in_threads(2, work)
    assert results[0].sockets[1].getpeername()[0] == "127.0.0.6"
    assert results[1].sockets[0].getpeername()[0] == "127.0.0.5"
    _close_all(results)


def test_addresses_that_others_have_too_are_left_out() -> None:
    """A container bridge has the same address on every host; the route decides the order of the rest."""
    ranked = tcp_connect._ranked(["172.17.0.1", "127.0.0.8", "127.0.0.1"], ["172.17.0.1", "127.0.0.77"])
    assert ranked == ["127.0.0.1", "127.0.0.8"]


def _run(client: Handshake, server: Handshake, tamper: Any = None) -> tuple[int, int]:
    """Lets two handshakes talk; `tamper(message_number, bytes)` may change what passes."""
    out, want = next(client)
    _, need = next(server)
    number = 0
    ranks = [-1, -1]
    while True:
        message = tamper(number, out) if tamper else out
        assert len(message) == need
        reply, need = server.send(message)
        if need == 0:
            with pytest.raises(StopIteration) as done:
                next(server)
            ranks[1] = done.value.value
        number += 1
        assert len(reply) == want
        try:
            out, want = client.send(tamper(number, reply) if tamper else reply)
        except StopIteration as stop:
            ranks[0] = stop.value
            return ranks[0], ranks[1]
        number += 1


def _people() -> tuple[Identity, Identity]:
    return Identity(1, 2, bytes(32), SECRET), Identity(0, 2, bytes(32), SECRET)


def test_handshake_proves_both_ranks() -> None:
    client, server = _people()
    assert _run(as_client(client, 0), as_server(server)) == (0, 1)


@pytest.mark.parametrize("message", range(4))
def test_handshake_refuses_every_changed_message(message: int) -> None:
    client, server = _people()

    def tamper(number: int, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if number == message else data

    with pytest.raises(HandshakeError):
        _run(as_client(client, 0), as_server(server), tamper)


def test_handshake_refuses_another_group() -> None:
    client = Identity(1, 2, b"x" * 32, SECRET)
    with pytest.raises(HandshakeError, match="another group"):
        _run(as_client(client, 0), as_server(_people()[1]))


def test_a_reflected_answer_is_refused() -> None:
    """A stranger that plays a server's own messages back to it gets no further."""
    me = Identity(0, 2, bytes(32), SECRET)
    server = as_server(me)
    next(server)
    hello = tcp_frames.VERSION.to_bytes(4, "little") + (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
    reply, _ = server.send(b"GFKERNEL" + hello + bytes(32) + bytes(32))
    with pytest.raises(HandshakeError, match="does not know the secret"):
        server.send(reply[-32:])


def test_mismatch_tells_both_signatures(pair: tuple[TcpChannels, TcpChannels]) -> None:
    a, b = (Endpoint(rank, end, compiled) for rank, end in enumerate(pair))
    a.begin(1, 0xAAAA)
    b.begin(1, 0xBBBB)
    assert a.put(b, 0, None) == OK
    assert a.progress() >= 0
    until_fault(b.progress, Fault.MISMATCH, "different signatures")
    assert pair[1].fault(0) is Fault.MISMATCH
    assert pair[1].signatures(0) == (0xBBBB, 0xAAAA)
    assert isinstance(pair[1].error(0), MismatchError)
    assert "rank 0 over TCP" in pair[1].explain(0)
    assert "0xaaaa" in pair[1].explain(0)


def test_garbage_is_a_protocol_fault(pair: tuple[TcpChannels, TcpChannels]) -> None:
    a, b = (Endpoint(rank, end, compiled) for rank, end in enumerate(pair))
    b.begin(1)
    pair[0].sockets[1].send(b"HTTP/1.1 400 Bad Request\r\n" * 4)
    until_fault(b.progress, Fault.PROTOCOL, "garbage")
    assert "sent no frame" in pair[1].explain(0)
    assert a.channels is pair[0]


def test_a_killed_process_is_lost_at_once() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        sock = socket.create_connection(listener.getsockname())
        theirs = channels(1, 2, {0: sock})
        signal.pause()
        os._exit(int(theirs.rank))
    sock, _ = listener.accept()
    listener.close()
    mine = channels(0, 2, {1: sock})
    end = Endpoint(0, mine, compiled)
    end.begin(1)
    assert end.progress() == 0
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until_fault(end.progress, Fault.PEER_LOST, "a killed process")
    error = mine.error(1)
    assert isinstance(error, PeerLostError)
    assert error.rank == 1
    mine.close()


def test_a_forked_child_closes_its_copies_and_the_parent_goes_on(pair: tuple[TcpChannels, TcpChannels]) -> None:
    a, b = (Endpoint(rank, end, compiled) for rank, end in enumerate(pair))
    target = b.own(0, 1000)
    a.begin(1)
    b.begin(1)
    pid = os.fork()
    if pid == 0:
        for end in pair:
            end.close_in_child()
        os._exit(0 if not pair[0].fds and not pair[0].table.any() else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    data = noise(1000)
    deliver(a, b, 0, data)
    assert (target == data).all()


def test_close_delivers_what_was_put_and_is_quick_when_all_close() -> None:
    ends = tcp_mesh(3)
    points = [Endpoint(rank, end, compiled) for rank, end in enumerate(ends)]
    for point in points:
        point.begin(1)
    for a in points:
        for b in points:
            if a is not b:
                assert a.put(b, 1, None) == OK
    started = time.monotonic()
    threads = [threading.Thread(target=end.close, kwargs={"timeout_s": 20}) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 10
    for end in ends:
        end.close()
        assert end.fds == []


def test_close_of_a_stuck_connection_takes_no_longer_than_it_may(pair: tuple[TcpChannels, TcpChannels]) -> None:
    a, b = (Endpoint(rank, end, compiled) for rank, end in enumerate(pair))
    a.begin(1)
    data = noise(32 << 20)
    assert a.put(b, 0, data) == AGAIN
    started = time.monotonic()
    pair[0].close(timeout_s=0.3)
    assert 0.2 < time.monotonic() - started < 1.5


def test_an_interrupted_system_call_is_repeated(pair: tuple[TcpChannels, TcpChannels]) -> None:
    """A timer's signals rain on a transfer."""
    a, b = (Endpoint(rank, end, compiled) for rank, end in enumerate(pair))
    target = b.own(0, 8 << 20)
    a.begin(1)
    b.begin(1)
    hits = [0]

    def count(*_: object) -> None:
        hits[0] += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for turn in range(10):
            data = noise(8 << 20, turn)
            deliver(a, b, 0, data)
            assert np.array_equal(target, data)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits[0] > 10
