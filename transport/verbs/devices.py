"""Owns the choice of RDMA ports: by name, else by the routes to the peers, else the first that works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gfkernels.errors import UnavailableError
from gfkernels.trace import log
from gfkernels.transport.meeting import route_source
from gfkernels.transport.verbs.settings import Settings
from gfkernels.transport.verbs.sysfs import ETHERNET, INFINIBAND, ROCE_V2, Card, Gid, Port, describe
from gfkernels.transport.verbs.words import MAX_RAILS

_SETTING: Final = "GFKERNELS_VERBS_DEVICE"
_NO_DEVICE: Final = (
    "Check that the card's driver is loaded (rdma link show; ibv_devinfo), and in a container that /dev/infiniband is "
    "passed in. Without a card, Soft-RoCE can stand in: rdma link add rxe0 type rxe netdev eth0"
)


@dataclass(frozen=True)
class Choice:
    """A port to use.

    Attributes:
        port: the port.
        gid: its address: of RoCE always, of InfiniBand where packets are to carry one (None: LIDs suffice).
        why: why this port, for the log.
    """

    port: Port
    gid: Gid | None
    why: str


def choose(cards: Sequence[Card], settings: Settings, sources: Sequence[tuple[str, str]] = ()) -> list[Choice]:
    """The ports to use, one a rail.

    Args:
        cards: what `sysfs.scan` found.
        settings: device and GID that the user wants.
        sources: (interface, address) of this host from which the routes to the peers leave, the most used first.

    Raises:
        UnavailableError: no port can be used; names everything that was found, and the remedy.
    """
    if not cards:
        raise UnavailableError("this host has no RDMA device", _NO_DEVICE)
    addresses = [address for _, address in sources]
    if settings.device is not None:
        ports, why = _named(cards, settings.device), f"{_SETTING}={settings.device}"
        for port in ports:
            _check(cards, port)
    else:
        port, why = _found(cards, sources)
        ports = [port]
    return [Choice(port, _gid(port, settings.gid_index, addresses), why) for port in ports]


def _named(cards: Sequence[Card], names: str) -> list[Port]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise UnavailableError(f"{_SETTING}={names!r} names no device", f"Devices of this host: {describe(cards)}")
    if len(wanted) > MAX_RAILS:
        raise UnavailableError(
            f"{_SETTING} names {len(wanted)} rails", f"Name at most {MAX_RAILS}: what more could carry is not used"
        )
    ports = []
    for name in wanted:
        device, _, number = name.partition(":")
        card = next((card for card in cards if card.name == device), None)
        if card is None:
            raise UnavailableError(
                f"there is no RDMA device {device!r}, which {_SETTING}={names} names",
                f"Choose among what there is: {describe(cards)}",
            )
        candidates = [port for port in card.ports if not number or str(port.number) == number]
        if not candidates:
            raise UnavailableError(
                f"RDMA device {device} has no port {number}", f"Choose among what there is: {describe([card])}"
            )
        ports.append(next((port for port in candidates if port.is_active), candidates[0]))
    if len({port.name for port in ports}) != len(ports):
        raise UnavailableError(f"{_SETTING}={names} names a port twice", "Name every rail once")
    return ports


def _check(cards: Sequence[Card], port: Port) -> None:
    card = next(card for card in cards if card.name == port.device)
    trouble = card.why_not()
    if trouble is not None:
        raise UnavailableError(*trouble)
    if not port.is_active:
        remedy = (
            "InfiniBand needs a cable and a subnet manager (opensm) on the network"
            if port.link_layer == INFINIBAND
            else f"Bring its interface up: ip link set {next(iter(port.interfaces), 'INTERFACE')} up"
        )
        raise UnavailableError(f"RDMA port {port.name} is {port.state}, expected ACTIVE", remedy)


def _found(cards: Sequence[Card], sources: Sequence[tuple[str, str]]) -> tuple[Port, str]:
    usable = [port for card in cards if card.why_not() is None for port in card.ports if port.is_active]
    if not usable:
        troubles = [trouble for trouble in (card.why_not() for card in cards) if trouble is not None]
        if len(troubles) == len(cards):
            raise UnavailableError(f"no RDMA device can be used: {describe(cards)}", troubles[0][1])
        raise UnavailableError(
            f"no RDMA port is active: {describe(cards)}",
            "InfiniBand needs a cable and a subnet manager (opensm); for RoCE, bring the interface up",
        )
    for interface, address in sources:
        for port in usable:
            # A GID made from the address also finds the port behind a bond or a VLAN.
            if interface in port.interfaces or any(gid.address == address for gid in port.gids):
                return port, f"the route to a peer leaves by {interface or address}"
    port = usable[0]
    if len(usable) == 1:
        return port, "the only active port"
    others = ", ".join(other.name for other in usable[1:])
    log.info("RDMA: %s is used, and %s not: name several rails in %s", port.name, others, _SETTING)
    return port, f"the first active port; there are also {others}"


def _gid(port: Port, index: int | None, addresses: Sequence[str]) -> Gid | None:
    if index is not None:
        for gid in port.gids:
            if gid.index == index:
                return gid
        raise UnavailableError(f"row {index} of the GID table of {port.name} is empty", f"In use: {port}")
    if port.link_layer == INFINIBAND:
        return None
    if port.link_layer != ETHERNET:
        raise UnavailableError(
            f"RDMA port {port.name} has link layer {port.link_layer!r}, expected InfiniBand or Ethernet",
            "Choose another device",
        )
    routable = [gid for gid in port.gids if gid.kind == ROCE_V2 and not gid.is_link_local]
    if not routable:
        raise UnavailableError(
            f"RDMA port {port.name} has no RoCE v2 GID that can be routed: {port}",
            f"Give its interface an IP address (ip address add ADDRESS/LENGTH dev "
            f"{next(iter(port.interfaces), 'INTERFACE')}), or set the GID's index to use a link-local one all the same",
        )
    # False sorts first: what the routes use, then what was made from IPv4, then the order of the table.
    return min(routable, key=lambda gid: (gid.address not in addresses, not gid.is_ipv4, gid.index))


def route_sources(peers: Sequence[str], interfaces: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """From where the routes to these addresses leave, the most used first.

    Args:
        peers: addresses of other ranks' hosts.
        interfaces: (interface, address) of this host.
    """
    names = {address: name for name, address in interfaces}
    uses: dict[str, int] = {}
    for peer in peers:
        if source := route_source(peer):
            uses[source] = uses.get(source, 0) + 1
    return [(names.get(source, ""), source) for source in sorted(uses, key=lambda source: -uses[source])]
