"""Owns what RDMA hardware this host has, as sysfs tells it: cards, their ports, and the addresses of those.

Needs neither pyverbs nor permission to use a card, so a report can name everything that was found.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

INFINIBAND: Final = "InfiniBand"
ETHERNET: Final = "Ethernet"
ROCE_V2: Final = "RoCE v2"
CHANNEL_ADAPTER: Final = 1
"""Node type of InfiniBand and RoCE cards; others (iWARP) know no write with immediate, or no verbs at all."""


@dataclass(frozen=True)
class Gid:
    """A row of a port's address table.

    Attributes:
        index: of the row.
        value: eight groups of four hexadecimal digits.
        kind: "RoCE v2", or "IB/RoCE v1".
        interface: the network interface that it belongs to; "" on InfiniBand.
    """

    index: int
    value: str
    kind: str
    interface: str = ""

    @property
    def address(self) -> str:
        """As an IP address: that of the interface where the GID was made from one."""
        ip = ipaddress.IPv6Address(self.value)
        return str(ip.ipv4_mapped or ip)

    @property
    def is_ipv4(self) -> bool:
        """Whether it was made from an IPv4 address."""
        return ipaddress.IPv6Address(self.value).ipv4_mapped is not None

    @property
    def is_link_local(self) -> bool:
        """Whether no router takes packets to it."""
        ip = ipaddress.IPv6Address(self.value)
        return (ip.ipv4_mapped or ip).is_link_local

    @property
    def subnet(self) -> str:
        """The upper half: on InfiniBand, which subnet the port is in."""
        return self.value[:19]


@dataclass(frozen=True)
class Port:
    """A port of a card.

    Attributes:
        device: the card's name.
        number: from 1.
        state: such as "ACTIVE" or "DOWN".
        link_layer: INFINIBAND or ETHERNET.
        rate: such as "100 Gb/sec (4X EDR)".
        lid: the port's address in its InfiniBand subnet; 0 on Ethernet.
        gids: rows that are in use.
        interfaces: network interfaces on this port.
    """

    device: str
    number: int
    state: str
    link_layer: str
    rate: str
    lid: int
    gids: tuple[Gid, ...]
    interfaces: tuple[str, ...]

    @property
    def name(self) -> str:
        """As the device setting takes it."""
        return f"{self.device}:{self.number}"

    @property
    def is_active(self) -> bool:
        """Whether packets can be sent."""
        return self.state == "ACTIVE"

    def __str__(self) -> str:
        """For errors and reports: all on one line."""
        where = f"LID {self.lid}" if self.link_layer == INFINIBAND else f"on {', '.join(self.interfaces) or 'nothing'}"
        gids = ", ".join(f"{gid.index}: {gid.address} ({gid.kind})" for gid in self.gids) or "none"
        return f"{self.name} {self.state} {self.link_layer} {self.rate} {where}, GIDs {gids}"


@dataclass(frozen=True)
class Card:
    """An RDMA device.

    Attributes:
        name: such as "mlx5_0".
        node_type: CHANNEL_ADAPTER for what we can use.
        firmware: its version, "" where the card tells none.
        verbs_path: the file that applications open; None where the kernel offers none.
        ports: in order.
    """

    name: str
    node_type: int
    firmware: str
    verbs_path: Path | None
    ports: tuple[Port, ...]

    def why_not(self) -> tuple[str, str] | None:
        """Why this process cannot open it, and the remedy; None where nothing is known to be in the way."""
        if self.node_type != CHANNEL_ADAPTER:
            return f"{self.name} is neither an InfiniBand nor a RoCE card", "Choose another device"
        if self.verbs_path is None:
            return f"the kernel offers no verbs for {self.name}", "Load the module: modprobe ib_uverbs"
        if not self.verbs_path.exists():
            return (
                f"{self.verbs_path} of {self.name} does not exist",
                "In a container, pass it: docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1",
            )
        if not os.access(self.verbs_path, os.R_OK | os.W_OK):
            return (
                f"user {os.getuid()} may not open {self.verbs_path} of {self.name}",
                "Add the user to the file's group (often rdma), or install rdma-core, whose udev rules open it to all",
            )
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""  # rows that are not in use answer with an error


def _number(text: str, default: int = 0) -> int:
    try:
        return int(text.partition(":")[0], 0)
    except ValueError:
        return default


def _natural(name: str) -> list[tuple[str, int]]:
    """Sorts mlx5_2 before mlx5_10."""
    return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder), key=_natural)
    except OSError:
        return []


def _gids(folder: Path) -> tuple[Gid, ...]:
    found = []
    for name in _names(folder / "gids"):
        value = _read(folder / "gids" / name)
        if value.strip("0:"):
            kind = _read(folder / "gid_attrs" / "types" / name)
            found.append(Gid(int(name), value, kind, _read(folder / "gid_attrs" / "ndevs" / name)))
    return tuple(found)


def _interfaces(card: Path, number: int, gids: Sequence[Gid], root: Path) -> tuple[str, ...]:
    found = [gid.interface for gid in gids if gid.interface]
    for name in _names(card / "device" / "net"):
        # Ports of one card share its folder; their interfaces count from 0.
        if _number(_read(root / "class" / "net" / name / "dev_port")) == number - 1:
            found.append(name)
    return tuple(dict.fromkeys(found))


def _port(card: Path, number: int, root: Path) -> Port:
    folder = card / "ports" / str(number)
    gids = _gids(folder)
    return Port(
        device=card.name,
        number=number,
        state=_read(folder / "state").partition(":")[2].strip() or "unknown",
        link_layer=_read(folder / "link_layer"),
        rate=_read(folder / "rate"),
        lid=_number(_read(folder / "lid")),
        gids=gids,
        interfaces=_interfaces(card, number, gids, root),
    )


def scan(root: Path = Path("/sys"), dev: Path = Path("/dev")) -> list[Card]:
    """All RDMA devices, in the order of their names; none is opened.

    Args:
        root: where sysfs is mounted.
        dev: where device files are.
    """
    files = {}
    for name in _names(root / "class" / "infiniband_verbs"):
        card = _read(root / "class" / "infiniband_verbs" / name / "ibdev")
        if card:
            files[card] = dev / "infiniband" / name
    cards = []
    for name in _names(root / "class" / "infiniband"):
        folder = root / "class" / "infiniband" / name
        numbers = [int(port) for port in _names(folder / "ports") if port.isdigit()]
        cards.append(
            Card(
                name=name,
                node_type=_number(_read(folder / "node_type")),
                firmware=_read(folder / "fw_ver"),
                verbs_path=files.get(name),
                ports=tuple(_port(folder, number, root) for number in numbers),
            )
        )
    return cards


def describe(cards: Sequence[Card]) -> str:
    """What was found, for an error: a clause a port."""
    parts = []
    for card in cards:
        trouble = card.why_not()
        parts += [f"{port}{f' ({trouble[0]})' if trouble else ''}" for port in card.ports]
        if not card.ports:
            parts.append(f"{card.name} without ports")
    return "; ".join(parts) or "no RDMA device"
