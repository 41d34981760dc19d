"""Owns imitations of sysfs and /dev: cards and ports of any kind, written into a temporary folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe77:0000"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
"""10.77.0.1"""
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0007"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"


@dataclass
class FakePort:
    """A port's folder."""

    layer: str = "Ethernet"
    state: str = "4: ACTIVE"
    lid: str = "0x0"
    rate: str = "100 Gb/sec (4X EDR)"
    gids: list[tuple[str, str]] = field(default_factory=lambda: [(LINK_LOCAL, V2), (IPV4, V2)])
    interface: str = "eth0"


def roce(**options: object) -> FakePort:
    """A RoCE port."""
    return FakePort(**options)  # type: ignore[arg-type]


def infiniband(state: str = "4: ACTIVE", lid: str = "0x7", subnet: str = "fe80:0000:0000:0000") -> FakePort:
    """An InfiniBand port."""
    return FakePort("InfiniBand", state, lid, gids=[(f"{subnet}:0002:c903:0000:0001", V1)], interface="")


class Host:
    """A host with cards.

    Attributes:
        root: its sysfs.
        dev: its /dev.
    """

    def __init__(self, folder: Path) -> None:
        self.root, self.dev = folder / "sys", folder / "dev"
        (self.root / "class" / "infiniband").mkdir(parents=True)
        (self.dev / "infiniband").mkdir(parents=True)

    def add(
        self,
        name: str,
        *ports: FakePort,
        node_type: str = "1: CA",
        verbs: str | None = "uverbs",
        mode: int | None = 0o666,
    ) -> Host:
        """Adds a card; `verbs` None: no verbs device; `mode` None: no file in /dev."""
        card = self.root / "class" / "infiniband" / name
        card.mkdir()
        (card / "node_type").write_text(node_type + "\n")
        (card / "fw_ver").write_text("16.35.2000\n")
        if verbs is not None:
            verbs += str(len(list((self.root / "class" / "infiniband").iterdir())) - 1)
            folder = self.root / "class" / "infiniband_verbs" / verbs
            folder.mkdir(parents=True)
            (folder / "ibdev").write_text(name + "\n")
            if mode is not None:
                path = self.dev / "infiniband" / verbs
                path.touch()
                path.chmod(mode)
        for number, port in enumerate(ports, 1):
            self._add_port(card, number, port)
        return self

    def _add_port(self, card: Path, number: int, port: FakePort) -> None:
        folder = card / "ports" / str(number)
        for name in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (folder / name).mkdir(parents=True)
        for name, text in (("state", port.state), ("link_layer", port.layer), ("rate", port.rate), ("lid", port.lid)):
            (folder / name).write_text(text + "\n")
        rows = [*port.gids, (ZERO, "")]  # unused rows read as zero, and their types not at all
        for index, (value, kind) in enumerate(rows):
            (folder / "gids" / str(index)).write_text(value + "\n")
            if kind:
                (folder / "gid_attrs/types" / str(index)).write_text(kind + "\n")
            if kind and port.interface:
                (folder / "gid_attrs/ndevs" / str(index)).write_text(port.interface + "\n")

    def add_interface(self, card: str, name: str, dev_port: int = 0) -> Host:
        """Adds a network interface (IPoIB) to a card."""
        (self.root / "class" / "infiniband" / card / "device" / "net" / name).mkdir(parents=True)
        folder = self.root / "class" / "net" / name
        folder.mkdir(parents=True)
        (folder / "dev_port").write_text(f"{dev_port}\n")
        return self
