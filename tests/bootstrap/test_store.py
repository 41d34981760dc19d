"""Owns the tests of the store and of control events against a real server thread."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gfkernels.bootstrap.control import TcpControl
from gfkernels.bootstrap.dial import Identity, dial
from gfkernels.bootstrap.frames import FrameError, FrameReader, Greeting, encode, proof, same_proof
from gfkernels.bootstrap.network import listen, resolve
from gfkernels.bootstrap.server import StoreServer
from gfkernels.bootstrap.store import LocalStore, Store, StoreTimeout, TcpStore
from gfkernels.errors import BootstrapError, PeerLostError, UsageError

SIZE = 3


class Hub:
    """A server with a store and a control connection for each of three ranks, all in this process."""

    def __init__(self) -> None:
        self.listener = listen(["127.0.0.1"], [0])
        self.port = self.listener.getsockname()[1]
        self.server = StoreServer([self.listener], "job", b"secret--", SIZE)
        self.stores = [TcpStore(self.server.adopt(rank, "store"), rank, SIZE, 5.0) for rank in range(SIZE)]
        self.controls = [TcpControl(self.server.adopt(rank, "control"), rank) for rank in range(SIZE)]
        self.server.start()

    def events(self, rank: int, count: int) -> list[dict[str, object]]:
        """Waits until `count` events have arrived."""
        events: list[dict[str, object]] = []
        end = time.monotonic() + 5
        while len(events) < count and time.monotonic() < end:
            if select.select([self.controls[rank]], [], [], 0.1)[0]:
                events += self.controls[rank].take()
        return events

    def close(self) -> None:
        self.server.close()
        for store, control in zip(self.stores, self.controls, strict=True):
            store.close()
            control.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


def test_keys(hub: Hub) -> None:
    a, b, _ = hub.stores
    a.set("k", {"x": [1, None, "é"]})
    assert b.get("k") == {"x": [1, None, "é"]}
    assert b.peek("nothing", 7) == 7 and b.peek("k") == {"x": [1, None, "é"]}
    assert [a.add("n"), b.add("n", 5), a.add("n", -2)] == [1, 6, 4]
    with pytest.raises(BootstrapError, match="'k' holds"):
        a.add("k")
    a.set("p/1", 1)
    a.set("p/2", 2)
    assert b.wait_all(["p/2", "p/1"]) == [2, 1]
    assert b.delete("p/") == 2 and b.peek("p/1") is None


def test_get_waits_for_set(hub: Hub) -> None:
    timer = threading.Timer(0.1, lambda: hub.stores[0].set("late", 1))
    timer.start()
    assert hub.stores[1].get("late") == 1
    timer.join()


def test_get_times_out_and_names_the_key(hub: Hub) -> None:
    hub.stores[0].set("there", 1)
    with pytest.raises(StoreTimeout, match="missing key: 'not there'") as caught:
        hub.stores[1].wait_all(["there", "not there"], timeout=0.05)
    assert caught.value.missing == ["not there"]
    assert hub.stores[1].get("there") == 1, "the connection goes on"


def test_gather_and_its_reuse(hub: Hub) -> None:
    results: dict[int, list[list[int]]] = {}

    def rank(place: int) -> None:
        store = hub.stores[place]
        results[place] = [store.gather("g", place, SIZE, place + 10 * i) for i in range(20)]

    threads = [threading.Thread(target=rank, args=(place,)) for place in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [[place + 10 * i for place in range(SIZE)] for i in range(20)]
    assert all(results[place] == expected for place in range(SIZE))


def test_gather_names_missing_ranks(hub: Hub) -> None:
    with pytest.raises(StoreTimeout, match="missing ranks: 0, 2") as caught:
        hub.stores[1].gather("g", 1, SIZE, None, timeout=0.05)
    assert caught.value.missing == [0, 2]


def test_gather_of_a_group_names_world_ranks(hub: Hub) -> None:
    with pytest.raises(StoreTimeout, match="missing rank: 2"):
        hub.stores[1].barrier("g", 0, 2, timeout=0.05, members=[1, 2])


def test_gather_place_taken(hub: Hub) -> None:
    with pytest.raises(StoreTimeout):
        hub.stores[1].gather("g", 1, SIZE, None, timeout=0.01)
    with pytest.raises(BootstrapError, match="taken"):
        hub.stores[0].gather("g", 1, SIZE, None, timeout=0.01)


def test_gather_fails_at_once_when_a_member_dies(hub: Hub) -> None:
    timer = threading.Timer(0.1, hub.controls[2].close)
    timer.start()
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 2 died") as caught:
        hub.stores[0].gather("g", 0, SIZE, None, timeout=20)
    assert caught.value.rank == 2 and time.monotonic() - begin < 10
    timer.join()
    with pytest.raises(PeerLostError):
        hub.stores[1].gather("g", 1, SIZE, None, timeout=5)
    assert hub.stores[1].gather("h", 0, 1, "x", members=[1]) == ["x"], "groups without it go on"


def test_many_threads_share_a_client(hub: Hub) -> None:
    failures: list[object] = []

    def work(name: str) -> None:
        for i in range(50):
            hub.stores[1].set(f"{name}{i}", i)
            if hub.stores[1].get(f"{name}{i}") != i:
                failures.append((name, i))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_oversized_value_is_refused_here(hub: Hub) -> None:
    with pytest.raises(UsageError, match="longer than"):
        hub.stores[1].set("big", "x" * (17 << 20))
    hub.stores[1].set("fine", "x" * (5 << 20))
    assert len(hub.stores[2].get("fine")) == 5 << 20


def test_events_reach_the_others(hub: Hub) -> None:
    assert hub.controls[0].take() == []
    assert hub.controls[1].post({"event": "abort", "comm": 3, "rank": 1, "reason": "why", "kind": "mismatch"})
    for rank in (0, 2):
        assert hub.events(rank, 1) == [{"event": "abort", "comm": 3, "rank": 1, "reason": "why", "kind": "mismatch"}]
    assert hub.controls[2].post({"event": "note"}, to=[1])
    assert hub.events(1, 1) == [{"event": "note"}]
    assert hub.controls[0].take() == []


def test_lost_and_left(hub: Hub) -> None:
    hub.controls[1].close()
    assert hub.events(0, 1) == [{"event": "lost", "rank": 1}]
    hub.controls[2].goodbye()
    hub.controls[2].close()
    assert hub.events(0, 1) == [{"event": "left", "rank": 2}]


def test_goodbye_survives_unread_events(hub: Hub) -> None:
    for _ in range(200):
        hub.controls[0].post({"event": "x" * 1000})
    hub.controls[2].goodbye()
    hub.controls[2].close()
    assert hub.events(0, 1) == [{"event": "left", "rank": 2}]


def test_server_leaves(hub: Hub) -> None:
    number = hub.controls[1].fileno()
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            hub.stores[1].get("never")
        except PeerLostError as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    hub.server.close()
    assert hub.events(1, 1) == [{"event": "left", "rank": 0}]
    thread.join()
    assert waiting and "'never'" in str(waiting[0])
    time.sleep(0.05)
    assert hub.controls[1].take() == []
    assert hub.controls[1].fileno() == number and not select.select([number], [], [], 0)[0], "quiet, not at its end"
    assert not hub.controls[1].post({"event": "x"})
    with pytest.raises(PeerLostError) as caught:
        hub.stores[2].set("k", 1)
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 1 << 30),
        struct.pack(">I", 3) + b"[1,",
        encode([1]),
        encode({}),
        encode({"rank": 1}),
        encode({"rank": "1", "size": 3, "role": "store", "nonce": "", "proof": ""}),
        encode({"rank": 1, "size": 3, "role": "store", "nonce": "", "proof": None}),
        encode({"rank": 1, "size": 3, "role": ["x"], "nonce": "", "proof": ""}),
        struct.pack(">I", 4000) + b"[" * 4000,
        os.urandom(300),
    ],
)
def test_strangers_are_dropped(hub: Hub, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", hub.port), 5) as sock:
        sock.sendall(data)
        received = b""
        sock.settimeout(5)
        while True:
            try:
                piece = sock.recv(4096)
            except ConnectionResetError:
                break
            if not piece:
                break
            received += piece
    assert b"welcome" not in received
    assert hub.stores[0].peek("x") is None, "the server goes on"


def _identity(**changes: object) -> Identity:
    return Identity(**{"job": "job", "secret": b"secret--", "rank": 1, "size": SIZE, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"secret": b"another-"}, "secrets differ"),
        ({"size": 4}, "world of 3 ranks"),
        ({"rank": 1}, "already rank 1"),
        ({"job": "other"}, "another job"),
    ],
)
def test_refusals(hub: Hub, changes: dict[str, object], words: str) -> None:
    with pytest.raises(BootstrapError, match=words):
        dial(lambda: resolve("127.0.0.1", hub.port), "x", _identity(**changes), "store", time.monotonic() + 0.5)


def test_a_server_without_the_secret_is_not_believed() -> None:
    """It answers the greeting like ours but cannot prove itself; its answer holds no proof of ours either."""
    listener = listen(["127.0.0.1"], [0])
    greeting = Greeting.fresh("job", "session")

    def serve() -> None:
        sock, _ = listener.accept()
        sock.sendall(encode(greeting.message()))
        answer = FrameReader().feed(sock.recv(4096))[0]
        # The best that it can do: send the client's own proof back.
        sock.sendall(encode({"welcome": True, "proof": answer["proof"]}))
        sock.recv(1)
        sock.close()

    thread = threading.Thread(target=serve)
    thread.start()
    port = listener.getsockname()[1]
    with pytest.raises(BootstrapError, match="does not know the secret"):
        dial(lambda: resolve("127.0.0.1", port), "x", _identity(), "store", time.monotonic() + 0.5)
    thread.join()
    listener.close()


def test_a_rank_that_is_gone_does_not_come_back(hub: Hub) -> None:
    hub.controls[1].close()
    assert hub.events(0, 1)
    with pytest.raises(BootstrapError, match=r"rank 1 of this session is gone \(lost\)"):
        dial(lambda: resolve("127.0.0.1", hub.port), "x", _identity(), "store", time.monotonic() + 0.5)


def test_frames() -> None:
    reader = FrameReader(100)
    data = encode([1]) + encode({"a": 2})
    assert [message for byte in data for message in reader.feed(bytes([byte]))] == [[1], {"a": 2}]
    assert reader.wanted() == 4
    with pytest.raises(FrameError, match="200 bytes"):
        reader.feed(struct.pack(">I", 200))
    with pytest.raises(FrameError, match="longer"):
        encode("x" * 100, limit=50)
    with pytest.raises(FrameError, match="version"):
        Greeting.parse({"gfkernels": 99})


def test_proofs_depend_on_everything() -> None:
    greeting = Greeting("job", "session", "nonce")
    base = (b"secret", "client", greeting, "n", 1, 2, "store")
    changed = [
        (b"secreT", *base[1:]),
        (base[0], "server", *base[2:]),
        (*base[:2], Greeting("job2", "session", "nonce"), *base[3:]),
        (*base[:2], Greeting("job", "session", "nonce2"), *base[3:]),
        (*base[:3], "m", *base[4:]),
        (*base[:4], 0, *base[5:]),
        (*base[:5], 3, base[6]),
        (*base[:6], "control"),
    ]
    proofs = {proof(*arguments) for arguments in [base, *changed]}
    assert len(proofs) == len(changed) + 1
    assert same_proof(proof(*base), proof(*base)) and not same_proof(proof(*base), None)


def test_values_are_json_not_pickle(hub: Hub) -> None:
    with pytest.raises(TypeError):
        hub.stores[0].set("k", object())
    hub.stores[0].set("ok", json.loads("[1]"))


def test_local_store() -> None:
    store: Store = LocalStore()
    store.set("a", 1)
    assert store.get("a") == 1 and store.add("n") == 1 and store.gather("g", 0, 1, 5) == [5]
    store.barrier("b", 0, 1)
    assert store.delete("a") == 1 and store.peek("a", "no") == "no"
    with pytest.raises(StoreTimeout):
        store.get("a", timeout=0.01)
    with pytest.raises(UsageError):
        store.gather("g", 0, 2, 5)
    store.close()


def test_why_rank_0_leaves_is_told_before_that_it_left() -> None:
    server = StoreServer([listen(["127.0.0.1"], [0])], "job", b"secret--", SIZE)
    controls = [TcpControl(server.adopt(rank, "control"), rank) for rank in range(SIZE)]
    assert controls[0].post({"event": "abort", "rank": 0})
    # As where the thread gets no time between the two: it starts when it is to end already.
    server._closing = True
    server.start()
    server.close()
    for control in controls[1:]:
        assert control.take()[:2] == [{"event": "abort", "rank": 0}, {"event": "left", "rank": 0}]
    for control in controls:
        control.close()


def test_close_leaves_no_descriptor_or_thread(eventually: Callable[..., None]) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    hub = Hub()
    assert descriptors() > before
    hub.close()
    eventually(lambda: descriptors() == before)
    assert not any(thread.name == "gfkernels-store" for thread in threading.enumerate())
