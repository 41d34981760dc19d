"""Connecting without a card: what is compared, who learns of failure, and what queue pairs are told."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from fake_pyverbs import ENUMS, Card

from gfkernels.errors import ConnectError, UnavailableError
from gfkernels.transport.meeting import Exchange
from gfkernels.transport.verbs import connect as module
from gfkernels.transport.verbs import device as device_module
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.connect import connect
from gfkernels.transport.verbs.device import Device, open_device
from gfkernels.transport.verbs.devices import Choice
from gfkernels.transport.verbs.loopback import in_threads
from gfkernels.transport.verbs.queue_pair import Path, QueuePair
from gfkernels.transport.verbs.rail import Rail
from gfkernels.transport.verbs.settings import Settings
from gfkernels.transport.verbs.side import Side
from gfkernels.transport.verbs.sysfs import ETHERNET, INFINIBAND, ROCE_V2, Gid, Port

SUBNET_A, SUBNET_B = "fec0:0000:0000:000a", "fec0:0000:0000:000b"
ROCE = Gid(3, "0000:0000:0000:0000:0000:ffff:0a4d:0001", ROCE_V2, "eth0")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card behind every device name."""
    card = Card()
    verbs = card.verbs()
    monkeypatch.setattr(device_module, "load", lambda: verbs)
    return card


@pytest.fixture
def device(card: Card) -> Any:
    """An opened device."""
    device = open_device("mlx5_0")
    yield device
    device.close()


def _rail(device: Device, layer: str = ETHERNET, gid: Gid | None = ROCE, *, lid: int = 0, mtu: int = 5) -> Rail:
    gids = (gid,) if gid else (Gid(0, f"{SUBNET_A}:0002:c903:0000:0001", "IB/RoCE v1"),)
    port = Port(device.name, 2, "ACTIVE", layer, "", lid, gids, ())
    return Rail(device, Choice(port, gid, "a test"), mtu, 1 << 23)


def _all(size: int, part: Callable[[int, Exchange], object]) -> list[Exception | None]:
    """What each rank raised."""

    def run(rank: int, exchange: Exchange) -> Exception | None:
        try:
            part(rank, exchange)
        except Exception as error:
            return error
        return None

    return in_threads(run, size)


def test_alone_there_is_nothing_to_connect() -> None:
    ends = connect(0, 1, exchange=lambda value: [value], rails=[])
    assert ends.table.shape[0] == 1 and not ends.links
    ends.close()


def test_one_rank_cannot_and_all_learn(device: Device) -> None:
    missing = UnavailableError("no card here", "Buy one")
    errors = _all(
        3, lambda rank, exchange: connect(rank, 3, exchange=exchange, rails=missing if rank == 1 else [_rail(device)])
    )
    assert errors[1] is missing
    for rank in (0, 2):
        assert isinstance(errors[rank], ConnectError)
        assert "rank 1 failed to use RDMA: UnavailableError: no card here. Buy one" in str(errors[rank])


def test_a_failure_in_the_middle_is_exchanged_and_all_is_closed(device: Device, card: Card) -> None:
    card.fail["CQ"] = errno.ENOMEM  # of whichever rank asks first
    errors = _all(2, lambda rank, exchange: connect(rank, 2, exchange=exchange, rails=[_rail(device)]))
    assert sorted(type(error).__name__ for error in errors) == ["ConnectError", "UnavailableError"]
    assert not device._children
    assert card.closed.count("MR") == 2 and card.closed.count("QP") == 1


def test_a_peer_that_cannot_be_joined(device: Device, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def join(self: Side, abouts: object, offers: object) -> None:
        card.fail["modify"] = errno.ENETUNREACH
        self._pairs[0].to_ready(Path(1, 3, ROCE.value, 0, 5), 9, 9, Settings())

    monkeypatch.setattr(Side, "join", join)
    errors = _all(2, lambda rank, exchange: connect(rank, 2, exchange=exchange, rails=[_rail(device)]))
    assert all(isinstance(error, ConnectError) for error in errors)
    assert any("no route leads there" in str(error) and ROCE.value in str(error) for error in errors)
    assert not device._children


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 99}, f"rank 1 has another version of the RDMA transport than rank 0: 99, not {w.VERSION}"),
        ({"order": "big"}, "byte order"),
        ({"slot": 128}, "size of frames"),
        ({"depth": 1}, "number of receives"),
        ({"rails": []}, "rank 1 has 0 RDMA rails"),
    ],
)
def test_what_must_be_equal(device: Device, change: dict[str, Any], text: str) -> None:
    def part(rank: int, exchange: Exchange) -> None:
        def said(value: Any) -> list[Any]:
            value["value"].update(change if rank == 1 else {})
            return exchange(value)

        connect(rank, 2, exchange=said, rails=[_rail(device)])

    for error in _all(2, part):
        assert isinstance(error, ConnectError) and text in str(error)


def test_networks_must_match(device: Device) -> None:
    errors = _all(
        2,
        lambda rank, exchange: connect(
            rank,
            2,
            exchange=exchange,
            rails=[_rail(device) if rank else _rail(device, INFINIBAND, None, lid=7)],
        ),
    )
    for error in errors:
        assert "mlx5_0:2 of rank 1 is Ethernet and mlx5_0:2 of rank 0 is InfiniBand" in str(error)


def test_paths(device: Device) -> None:
    roce = _rail(device, mtu=3)
    assert roce.path({**roce.about(), "mtu": 5}) == Path(2, 3, ROCE.value, 0, 3)
    near = _rail(device, INFINIBAND, None, lid=7)
    there = near.about()
    assert near.path({**there, "lid": 9, "mtu": 4}) == Path(2, 0, None, 9, 4)
    far = f"{SUBNET_B}:0002:c903:0000:0002"
    assert near.path({**there, "lid": 9, "gid": far}) == Path(2, 0, far, 9, 5)
    assert near.path({**there, "lid": 9, "global": True}).gid == there["gid"]


def test_what_a_queue_pair_is_told(device: Device, card: Card) -> None:
    cq = device.create_cq(10)
    pair = QueuePair(device, cq)
    assert pair.inline_nbytes == card.most_inline  # the first step that is not refused
    pair.to_init(2)
    pair.post_receives(77, 3)
    settings = Settings(timeout_exponent=14, retry_count=5, traffic_class=96, service_level=3)
    pair.to_ready(Path(2, 3, ROCE.value, 0, 4), 0x55, 0x66, settings)
    pair.to_error()
    assert pair.owned.thing.received == [(77, 0)] * 3
    (s0, m0, init), (s1, m1, rtr), (s2, m2, rts), (s3, m3, _) = card.modified
    assert (s0, s1, s2, s3) == (ENUMS.IBV_QPS_INIT, ENUMS.IBV_QPS_RTR, ENUMS.IBV_QPS_RTS, ENUMS.IBV_QPS_ERR)
    assert (m0, m1, m2, m3) == (0x39, 0x129181, 0x12E01, 1)  # what libibverbs wants of RC, no more and no less
    assert (init["port_num"], init["qp_access_flags"]) == (
        2,
        ENUMS.IBV_ACCESS_LOCAL_WRITE | ENUMS.IBV_ACCESS_REMOTE_WRITE,
    )
    assert (rtr["path_mtu"], rtr["dest_qp_num"], rtr["rq_psn"]) == (4, 0x55, 0x66)
    handle = rtr["ah_attr"]
    assert (handle.is_global, handle.sl, handle.port_num) == (1, 3, 2)
    assert (handle.gr.dgid, handle.gr.sgid_index, handle.gr.traffic_class) == (ROCE.value, 3, 96)
    assert (rts["timeout"], rts["retry_cnt"], rts["rnr_retry"], rts["sq_psn"]) == (14, 5, 6, pair.psn)
    pair.owned.close()
    pair.to_error()  # of a closed one: nothing
    cq.close()


def test_queues_of_the_card_are_large_enough(device: Device, card: Card) -> None:
    cq = device.create_cq(10)
    card.limits.max_qp_wr = w.DEPTH - 1
    with pytest.raises(UnavailableError, match=f"{w.DEPTH - 1} requests, and {max(w.DEPTH, w.SEND_DEPTH)} are needed"):
        QueuePair(device, cq)
    card.limits.max_qp_wr = 500
    card.most_inline = -1
    with pytest.raises(UnavailableError, match="made no queue pair"):
        QueuePair(device, cq)
    cq.close()


def test_no_more_is_asked_for_than_is_outstanding(device: Device, card: Card) -> None:
    side = Side(_rail(device), [1, 2, 3], Settings(), 8256)
    card.limits.max_cqe = 3 * (w.SEND_DEPTH + w.DEPTH) - 1
    with pytest.raises(UnavailableError, match=f"needs {3 * (w.SEND_DEPTH + w.DEPTH)} entries"):
        side.prepare([0, 1, 2])
    side.close()
    assert not device._children


def test_a_silent_peer_is_named_with_both_ends(device: Device) -> None:
    class Silent:
        links: ClassVar[dict[int, object]] = {1: [], 2: []}

        def probe(self, timeout_s: float) -> list[int]:
            return [1, 2]

    hellos = [{"rails": [_rail(device).about()]}, {"rails": [_rail(device, INFINIBAND, None, lid=9).about()]}, {}]
    with pytest.raises(ConnectError) as caught:
        module._probe(0, Silent(), hellos, 2.5)  # type: ignore[arg-type]
    for text in ("rank 0 does not reach rank 1, nor ranks 2", "in 2.5 s", ROCE.value, "LID 9", "UDP port 4791"):
        assert text in str(caught.value)
