"""Which port is chosen, with which address, and what is said where none can be: over imitations of sysfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_sysfs import IPV4, IPV6, LINK_LOCAL, V1, V2, Host, infiniband, roce

from gfkernels.errors import ConfigError, UnavailableError
from gfkernels.transport.verbs.devices import Choice, choose, route_sources
from gfkernels.transport.verbs.settings import Settings
from gfkernels.transport.verbs.sysfs import Card, describe, scan


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host without a card."""
    return Host(tmp_path)


def _scan(host: Host) -> list[Card]:
    return scan(host.root, host.dev)


def _choose(host: Host, device: str | None = None, gid_index: int | None = None, **more: object) -> list[Choice]:
    return choose(_scan(host), Settings(device=device, gid_index=gid_index), **more)  # type: ignore[arg-type]


def _refusal(host: Host, device: str | None = None, gid_index: int | None = None) -> UnavailableError:
    with pytest.raises(UnavailableError) as caught:
        _choose(host, device, gid_index)
    assert caught.value.remedy
    return caught.value


def test_what_is_read(host: Host) -> None:
    host.add("mlx5_0", infiniband(), infiniband(state="1: DOWN")).add_interface("mlx5_0", "ib1", dev_port=1)
    host.add("rxe0", roce())
    ib, rxe = _scan(host)
    assert (ib.name, ib.node_type, ib.firmware) == ("mlx5_0", 1, "16.35.2000")
    assert [(p.name, p.state, p.lid, p.link_layer) for p in ib.ports] == [
        ("mlx5_0:1", "ACTIVE", 7, "InfiniBand"),
        ("mlx5_0:2", "DOWN", 7, "InfiniBand"),
    ]
    assert [p.interfaces for p in ib.ports] == [(), ("ib1",)]
    port = rxe.ports[0]
    assert [(g.index, g.address, g.kind, g.interface) for g in port.gids] == [
        (0, "fe80::5054:ff:fe77:0", V2, "eth0"),
        (1, "10.77.0.1", V2, "eth0"),
    ]
    assert port.gids[0].is_link_local and port.gids[1].is_ipv4 and not port.gids[1].is_link_local
    assert port.interfaces == ("eth0",)
    assert rxe.verbs_path == host.dev / "infiniband" / "uverbs1"
    text = describe([ib, rxe])
    for part in ("mlx5_0:1 ACTIVE", "mlx5_0:2 DOWN", "LID 7", "rxe0:1", "10.77.0.1 (RoCE v2)", "100 Gb/sec"):
        assert part in text


def test_no_device(host: Host, tmp_path: Path) -> None:
    assert "no RDMA device" in str(_refusal(host))
    assert scan(tmp_path / "nowhere") == []


def test_infiniband_goes_by_lid(host: Host) -> None:
    host.add("mlx5_0", infiniband())
    (choice,) = _choose(host)
    assert choice.port.name == "mlx5_0:1" and choice.gid is None and choice.why == "the only active port"
    (choice,) = _choose(host, gid_index=0)
    assert choice.gid is not None and choice.gid.index == 0


def test_roce_takes_a_routable_gid(host: Host) -> None:
    host.add("rxe0", roce(gids=[(LINK_LOCAL, V1), (LINK_LOCAL, V2), (IPV6, V2), (IPV4, V1), (IPV4, V2)]))
    (choice,) = _choose(host)
    assert choice.gid is not None and choice.gid.index == 4
    (choice,) = _choose(host, sources=[("eth0", "2001:db8::7")])
    assert choice.gid is not None and choice.gid.index == 2
    (choice,) = _choose(host, gid_index=1)
    assert choice.gid is not None and choice.gid.is_link_local
    error = _refusal(host, gid_index=9)
    assert "row 9" in error.reason and "4: 10.77.0.1" in error.remedy


@pytest.mark.parametrize("gids", [[(LINK_LOCAL, V2)], [(IPV4, V1)], []])
def test_roce_is_never_silently_link_local(host: Host, gids: list[tuple[str, str]]) -> None:
    host.add("rxe0", roce(gids=gids))
    error = _refusal(host)
    assert "no RoCE v2 GID that can be routed" in error.reason and "rxe0:1" in error.reason
    assert "ip address add" in error.remedy


def test_down_ports(host: Host) -> None:
    host.add("mlx5_0", infiniband(state="1: DOWN"), infiniband())
    assert _choose(host)[0].port.name == "mlx5_0:2"
    assert _choose(host, "mlx5_0")[0].port.name == "mlx5_0:2"
    error = _refusal(host, "mlx5_0:1")
    assert "mlx5_0:1 is DOWN" in error.reason and "opensm" in error.remedy


def test_all_ports_down(host: Host) -> None:
    host.add("rxe0", roce(state="1: DOWN"))
    error = _refusal(host)
    assert "no RDMA port is active" in error.reason and "rxe0:1 DOWN" in error.reason
    assert "ip link set eth0 up" in _refusal(host, "rxe0").remedy


def test_by_name(host: Host) -> None:
    host.add("mlx5_0", infiniband()).add("mlx5_1", infiniband()).add("mlx5_10", infiniband())
    assert [c.port.name for c in _choose(host, "mlx5_1, mlx5_10:1")] == ["mlx5_1:1", "mlx5_10:1"]
    assert "GFKERNELS_VERBS_DEVICE=mlx5_1" in _choose(host, "mlx5_1")[0].why
    for name, reason in (
        ("mlx4_0", "no RDMA device 'mlx4_0'"),
        ("mlx5_0:3", "no port 3"),
        ("mlx5_0,mlx5_0:1", "twice"),
        (",", "names no device"),
        (",".join(["mlx5_0"] * 9), "9 rails"),
    ):
        assert reason in _refusal(host, name).reason
    assert "mlx5_10:1 ACTIVE" in _refusal(host, "mlx4_0").remedy


def test_by_route(host: Host) -> None:
    host.add("mlx5_0", infiniband()).add_interface("mlx5_0", "ib0")
    host.add("rxe0", roce())
    assert _choose(host)[0].port.name == "mlx5_0:1"
    for source, name in ((("ib0", "10.1.0.1"), "mlx5_0:1"), (("eth0", "10.9.9.9"), "rxe0:1")):
        (choice,) = _choose(host, sources=[source])
        assert choice.port.name == name and source[0] in choice.why
    # The interface is a bond's or a VLAN's, which sysfs shows at no port: the address decides.
    assert _choose(host, sources=[("bond0", "10.77.0.1")])[0].port.name == "rxe0:1"
    assert _choose(host, sources=[("lo", "127.0.0.1")])[0].port.name == "mlx5_0:1"


def test_a_card_that_cannot_be_opened(host: Host) -> None:
    host.add("a", roce(), node_type="4: RNIC").add("b", roce(), verbs=None).add("c", roce(), mode=None)
    text = str(_refusal(host))
    for part in ("a is neither", "no verbs for b", "uverbs2 of c does not exist"):
        assert part in text
    assert "docker run --device=/dev/infiniband" in _refusal(host, "c").remedy
    host.add("d", roce())
    assert _choose(host)[0].port.name == "d:1"


def test_no_permission(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.add("mlx5_0", infiniband())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    error = _refusal(host)
    assert f"user {os.getuid()} may not open" in error.reason and "rdma" in error.remedy


def test_an_unknown_link_layer(host: Host) -> None:
    host.add("x", roce(layer="Unspecified"))
    assert "link layer 'Unspecified'" in _refusal(host).reason


def test_routes() -> None:
    interfaces = [("lo", "127.0.0.1")]
    assert route_sources(["127.0.0.1", "127.0.0.1"], interfaces) == [("lo", "127.0.0.1")]
    assert route_sources(["127.0.0.1"], []) == [("", "127.0.0.1")]
    assert route_sources(["256.0.0.1"], interfaces) == []


@pytest.mark.parametrize("setting", [{"retry_count": 7}, {"timeout_exponent": 0}, {"gid_index": -1}])
def test_settings_are_checked(setting: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Settings(**setting)  # type: ignore[arg-type]
