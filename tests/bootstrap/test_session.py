"""Owns the tests of whole worlds of real processes: they meet whatever is in the way, and notice who is gone."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gfkernels.bootstrap import Session, connect, discover
from gfkernels.bootstrap.network import interface_addresses
from gfkernels.bootstrap.server import Connection, StoreServer
from gfkernels.config import Config
from gfkernels.errors import BootstrapError, ConfigError, PeerLostError, UsageError

Start = Callable[..., Any]


def torchrun(rank: int, size: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def join(rank: int, size: int, port: int, **options: Any) -> Session:
    options.setdefault("connect_timeout_s", 10)
    world = discover(torchrun(rank, size, port), job_id=options.get("job_id"))
    return connect(world, Config.load(options, {}))


def meet(rank: int, size: int, port: int, delay: float = 0.0, **options: Any) -> list[Any]:
    time.sleep(delay)
    session = join(rank, size, port, **options)
    ranks = session.store.gather("ranks", rank, size, rank)
    session.store.barrier("end", rank, size)
    result = [ranks, session.secret, session.job_id, session.world.local_rank, session.hosts.local_ranks]
    session.close()
    return result


def test_ranks_start_in_any_order(start: Start, port: int) -> None:
    delays = [0.3, 0.0, 0.6, 0.1]
    results = [rank.result() for rank in [start(meet, r, 4, port, delays[r]) for r in range(4)]]
    assert [result[0] for result in results] == [[0, 1, 2, 3]] * 4
    assert len({result[1] for result in results}) == 1 and len(results[0][1]) == 32
    assert len({result[2] for result in results}) == 1
    assert [result[3] for result in results] == [0, 1, 2, 3]
    assert results[0][4] == (0, 1, 2, 3)


def test_a_world_of_one_opens_nothing() -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    session = connect(discover({}), Config())
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert session.control.fileno() == -1 and session.control.take() == [] and len(session.secret) == 32
    assert session.hosts.local_size == 1 and session.hosts.cores_available > 0
    session.close()


@pytest.mark.parametrize("store", ["localhost:{}", "127.0.0.1:{}", "[::1]:{}", "ip6-localhost:{}"])
def test_explicit_store(start: Start, port: int, store: str) -> None:
    host = store.rpartition(":")[0].strip("[]")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
    except OSError as error:
        pytest.skip(f"{host} is no address of this machine: {error}")

    def rank(r: int) -> Any:
        session = connect(discover({}, rank=r, size=2, store=store.format(port)), Config(connect_timeout_s=10))
        ranks = session.store.gather("ranks", r, 2, r)
        session.close()
        return ranks

    assert [each.result() for each in [start(rank, 1), start(rank, 0)]] == [[0, 1], [0, 1]]


def test_an_address_of_this_machine_with_a_secret(start: Start, port: int) -> None:
    addresses = interface_addresses()
    if not addresses:
        pytest.skip("this machine has no address but loopback")

    def rank(r: int, **options: Any) -> Any:
        store = f"{addresses[0][1]}:{port}" if ":" not in addresses[0][1] else f"[{addresses[0][1]}]:{port}"
        session = connect(discover({}, rank=r, size=2, store=store), Config.load({"connect_timeout_s": 10, **options}))
        found = session.store.gather("x", r, 2, session.world.single_host)
        session.close()
        return found

    def with_secret(r: int) -> Any:
        return rank(r, secret="long enough")

    assert [each.result() for each in [start(with_secret, 0), start(with_secret, 1)]] == [[True, True]] * 2
    with pytest.raises(ConfigError, match=r"GFKERNELS_SECRET.*GFKERNELS_SECRET_FILE.*comm="):
        start(rank, 0).result()


@pytest.mark.slow
def test_wrong_secret(start: Start, port: int) -> None:
    def rank(r: int, secret: str) -> None:
        world = discover({}, rank=r, size=2, store=f"localhost:{port}")
        connect(world, Config(secret=secret, connect_timeout_s=4))

    ranks = [start(rank, 0, "one secret"), start(rank, 1, "another one")]
    errors = [str(each.error()) for each in ranks]
    assert "missing rank 1" in errors[0] and "secrets differ" in errors[0]
    assert "secrets differ" in errors[1] and str(port) in errors[1]


@pytest.mark.slow
def test_wrong_job_id(start: Start, port: int) -> None:
    def rank(r: int, job: str, seconds: float) -> None:
        join(r, 2, port, job_id=job, connect_timeout_s=seconds)

    # Rank 1 looks longer than rank 0 waits: what it met is told although it is gone by then.
    errors = [str(each.error()) for each in [start(rank, 0, "mine", 2.0), start(rank, 1, "yours", 4.0)]]
    assert "missing rank 1" in errors[0]
    assert "another job" in errors[1] and "mine" in errors[1] and "by now: Connection refused" in errors[1]


@pytest.mark.slow
def test_missing_ranks_are_named_everywhere(start: Start, port: int) -> None:
    def rank(r: int) -> None:
        join(r, 5, port, connect_timeout_s=1.5)

    for each in [start(rank, 0), start(rank, 2), start(rank, 3)]:
        error = each.error()
        assert isinstance(error, BootstrapError)
        assert "1, 4" in str(error), error


def test_no_rank_0(start: Start, port: int) -> None:
    def rank() -> None:
        join(1, 2, port, connect_timeout_s=0.5)

    error = start(rank).error()
    assert isinstance(error, BootstrapError) and str(port + 1) in str(error) and "refused" in str(error)


def test_unknown_host_name() -> None:
    world = discover({}, rank=1, size=2, store="no-such-host.invalid:4000")
    with pytest.raises(BootstrapError, match=r"no-such-host\.invalid:4000.*no address"):
        connect(world, Config(secret="long enough", connect_timeout_s=0.3))


def test_foreign_listeners_are_passed_over(start: Start, port: int) -> None:
    """One says nothing, one talks something else, one hangs up; ours is on the fourth port."""
    listeners = [socket.create_server(("127.0.0.1", port + above)) for above in (1, 2, 3)]
    done = threading.Event()

    def chat(listener: socket.socket, words: bytes, stay: bool) -> None:
        listener.settimeout(0.1)
        kept = []
        while not done.is_set():
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                continue
            sock.sendall(words)
            kept.append(sock) if stay else sock.close()
        for sock in kept:
            sock.close()

    threads = [
        threading.Thread(target=chat, args=arguments)
        for arguments in zip(listeners, (b"", b"SSH-2.0-x\r\n" * 9, b""), (True, True, False), strict=True)
    ]
    ranks = [start(meet, r, 2, port) for r in (1, 0)]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    try:
        assert [rank.result()[0] for rank in ranks] == [[0, 1], [0, 1]]
        assert time.monotonic() - begin < 8, "a silent stranger must not hold anyone up"
    finally:
        done.set()
        for thread in threads:
            thread.join()
        for listener in listeners:
            listener.close()


def test_two_worlds_at_one_address(start: Start, port: int) -> None:
    ranks = [start(meet, r, 2, port, 0.0) for r in (0, 1)]
    others = []
    for r in (0, 1, 2):

        def other(r: int = r) -> list[Any]:
            return meet(r, 3, port, job_id="other")

        others.append(start(other))
    assert [rank.result()[0] for rank in ranks] == [[0, 1]] * 2
    assert [rank.result()[0] for rank in others] == [[0, 1, 2]] * 3


def test_port_in_use(port: int) -> None:
    world = discover({}, rank=0, size=2, store=f"127.0.0.1:{port}")
    message = rf"127\.0\.0\.1:{port} \(Address already in use\)"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(BootstrapError, match=message):
        connect(world, Config(secret="long enough"))


def test_all_ports_in_use(port: int) -> None:
    listeners = [socket.create_server(("127.0.0.1", port + above)) for above in range(1, 17)]
    try:
        world = discover({**torchrun(0, 2, port), "LOCAL_WORLD_SIZE": "2"})
        with pytest.raises(BootstrapError, match=f"{port + 16}") as caught:
            connect(world, Config(secret="long enough", bind_address="127.0.0.1"))
        assert str(port + 1) in str(caught.value)
    finally:
        for listener in listeners:
            listener.close()


def test_master_port_is_left_alone(start: Start, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        assert [rank.result()[0] for rank in [start(meet, r, 2, port) for r in (0, 1)]] == [[0, 1]] * 2


def test_connect_again_after_close(start: Start, port: int) -> None:
    """Rank 1 comes back while rank 0 still serves the old session: it must wait for the new one."""

    def rank(r: int) -> list[Any]:
        seen = []
        for turn in range(3):
            session = join(r, 2, port)
            seen.append(session.store.gather("x", r, 2, turn))
            session.store.barrier("end", r, 2)
            if r == 0:
                time.sleep(0.15)
            session.close()
        return seen

    assert [each.result() for each in [start(rank, 0), start(rank, 1)]] == [[[t, t] for t in range(3)]] * 2


def _watch(session: Session, count: int, seconds: float = 5.0) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    end = time.monotonic() + seconds
    while len(events) < count and time.monotonic() < end:
        if select.select([session.control], [], [], max(0.0, end - time.monotonic()))[0]:
            events += session.control.take()
    return events


def watcher(rank: int, size: int, port: int, ready: str, count: int, seconds: float) -> Any:
    session = join(rank, size, port)
    Path(f"{ready}.{rank}").touch()
    begin = time.time()
    events = _watch(session, count, seconds)
    return events, time.time(), begin


def _started(eventually: Any, start: Start, port: int, ready: Path, count: int, seconds: float) -> list[Any]:
    ranks = [start(watcher, r, 3, port, str(ready), count, seconds) for r in range(3)]
    eventually(lambda: all(Path(f"{ready}.{r}").exists() for r in range(3)), 10)
    return ranks


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_noticed(start: Start, port: int, tmp_path: Path, eventually: Any, victim: int) -> None:
    ranks = _started(eventually, start, port, tmp_path / "ready", 1, 5)
    killed = time.time()
    ranks[victim].kill()
    for r in {0, 1, 2} - {victim}:
        events, noticed, _ = ranks[r].result()
        # The other survivor may have ended, too, by the time that we look.
        assert events[0] == {"event": "lost", "rank": victim}
        assert noticed - killed < 1


def test_rank_0_hears_last_who_died(monkeypatch: pytest.MonkeyPatch) -> None:
    # It may end at the news, and the server with it: whoever had not heard by then would blame rank 0.
    told = []
    server = StoreServer([], "job", b"secret--", 4)
    ends = [server.adopt(rank, "control") for rank in range(4)]
    send = server._send

    def noted(connection: Connection, message: Any) -> None:
        told.append((connection.rank, message))
        send(connection, message)

    monkeypatch.setattr(server, "_send", noted)
    server.start()
    ends[2].close()
    assert ends[0].recv(1 << 16)
    server.close()
    lost = {"event": "lost", "rank": 2}
    assert [rank for rank, message in told if message == lost] == [3, 1, 0]
    for end in ends:
        end.close()


def test_a_stopped_rank_0_is_not_called_dead(start: Start, port: int, tmp_path: Path, eventually: Any) -> None:
    ranks = _started(eventually, start, port, tmp_path / "ready", 1, 1.0)
    ranks[0].kill(signal.SIGSTOP)
    for r in (1, 2):
        assert ranks[r].result()[0] == []
    ranks[0].kill(signal.SIGCONT)
    assert {event["rank"] for event in ranks[0].result()[0]} <= {1, 2}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_forked_child_holds_nothing_open(
    start: Start, port: int, tmp_path: Path, eventually: Any, victim: int
) -> None:
    def parent(r: int) -> Any:
        session = join(r, 2, port)
        if r == victim:
            child = os.fork()
            if child == 0:
                refused = False
                try:
                    session.store.set("from the child", 1)
                except UsageError:
                    refused = True
                posted = session.control.post({"event": "from the child"})
                session.close()
                (tmp_path / "child").write_text(f"{os.getpid()} {refused} {posted}")
                time.sleep(30)
                os._exit(0)
            eventually((tmp_path / "child").exists)
            # The child's close must have said nothing: rank r still works.
            session.store.set("alive", r)
            session.store.get("seen")
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        session.store.get("alive")
        session.store.set("seen", r)
        return _watch(session, 1)

    ranks = [start(parent, r) for r in (0, 1)]
    try:
        assert ranks[1 - victim].result() == [{"event": "lost", "rank": victim}]
    finally:
        child, refused, posted = (tmp_path / "child").read_text().split()
        os.kill(int(child), 0)
        os.kill(int(child), signal.SIGKILL)
    assert (refused, posted) == ("True", "False")


def test_closing_in_turn_is_leaving(start: Start, port: int) -> None:
    def rank(r: int) -> Any:
        session = join(r, 3, port)
        session.store.barrier("all", r, 3)
        if r == 2:
            session.close()
            return []
        events = _watch(session, 1)
        if r == 1:
            events += _watch(session, 1)
            with pytest.raises(PeerLostError):
                session.store.set("x", 1)
        else:
            time.sleep(0.1)
        session.close()
        return events

    results = [each.result() for each in [start(rank, r) for r in range(3)]]
    assert results[0] == [{"event": "left", "rank": 2}]
    assert results[1] == [{"event": "left", "rank": 2}, {"event": "left", "rank": 0}]


def test_a_rank_that_dies_while_others_start(start: Start, port: int, tmp_path: Path, eventually: Any) -> None:
    def waiting(r: int) -> None:
        join(r, 3, port, connect_timeout_s=20).close()

    survivors = [start(waiting, 0), start(waiting, 1)]
    time.sleep(0.3)
    survivors[1].kill()
    begin = time.monotonic()
    error = survivors[0]

    def late() -> None:
        join(2, 3, port, connect_timeout_s=20).close()

    # Rank 1 had contributed, so its death shows to whoever calls next; rank 2's start completes the gather.
    start(late).result()
    error.result()
    assert time.monotonic() - begin < 15


def test_ctrl_c_while_others_are_missing(start: Start, port: int) -> None:
    def rank() -> str:
        try:
            join(0, 2, port, connect_timeout_s=30)
        except KeyboardInterrupt:
            return f"{threading.active_count()} thread"
        return "connected"

    waiting = start(rank)
    time.sleep(0.5)
    waiting.kill(signal.SIGINT)
    assert waiting.result(3) == "1 thread"
