"""Owns a rail: an opened device, the port of it that is used, and what peers must know of that port."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gfkernels.errors import UnavailableError
from gfkernels.trace import log
from gfkernels.transport.verbs import sysfs
from gfkernels.transport.verbs.compat import load
from gfkernels.transport.verbs.device import Device, open_device
from gfkernels.transport.verbs.devices import Choice, choose
from gfkernels.transport.verbs.queue_pair import Path
from gfkernels.transport.verbs.settings import Settings

_MOST_NBYTES: Final = 1 << 30


@dataclass(frozen=True)
class Rail:
    """A port in use.

    Attributes:
        device: its device; `Device.close` is called once for each rail.
        choice: the port.
        mtu: the port's active one: enum ibv_mtu.
        most_nbytes: of one message.
    """

    device: Device
    choice: Choice
    mtu: int
    most_nbytes: int

    def about(self) -> dict[str, Any]:
        """What peers must know, as JSON."""
        port, gid = self.choice.port, self.choice.gid
        first = next((row for row in port.gids if row.index == 0), None)
        used = gid or first
        return {
            "port": port.name,
            "layer": port.link_layer,
            "lid": port.lid,
            "gid": used.value if used else None,
            "kind": used.kind if used else None,
            "global": gid is not None,
            "mtu": self.mtu,
            "most": self.most_nbytes,
        }

    def path(self, there: dict[str, Any]) -> Path:
        """The way to a peer's port.

        Args:
            there: the peer's `about`.
        """
        here = self.about()
        crosses = here["global"] or there["global"]
        if self.choice.port.link_layer == sysfs.INFINIBAND and here["gid"] and there["gid"]:
            crosses = crosses or here["gid"][:19] != there["gid"][:19]  # another subnet
        return Path(
            port=self.choice.port.number,
            gid_index=self.choice.gid.index if self.choice.gid else 0,
            gid=there["gid"] if crosses else None,
            lid=there["lid"],
            mtu=min(self.mtu, there["mtu"]),
        )


def open_rails(
    settings: Settings, sources: Sequence[tuple[str, str]] = (), cards: Sequence[sysfs.Card] | None = None
) -> list[Rail]:
    """Chooses ports and opens their devices; whoever calls closes each rail's device.

    Args:
        settings: what the user wants.
        sources: see `devices.choose`.
        cards: what there is; None: looked up.

    Raises:
        UnavailableError: no pyverbs, no device, no permission, no address; with the remedy.
    """
    choices = choose(sysfs.scan() if cards is None else cards, settings, sources)
    load()
    rails: list[Rail] = []
    try:
        for choice in choices:
            rails.append(_open(choice))
    except BaseException:
        close_rails(rails)
        raise
    return rails


def _open(choice: Choice) -> Rail:
    device = open_device(choice.port.device)
    try:
        attributes = device.context.query_port(choice.port.number)
    except device.verbs.Error as error:
        device.close()
        raise UnavailableError(f"RDMA port {choice.port.name} cannot be queried: {error}") from error
    log.info("RDMA: %s is used: %s", choice.port.name, choice.why)
    if choice.gid is not None:
        log.info("RDMA: GID %d, %s (%s)", choice.gid.index, choice.gid.address, choice.gid.kind)
    return Rail(device, choice, int(attributes.active_mtu), min(int(attributes.max_msg_sz), _MOST_NBYTES))


def close_rails(rails: Sequence[Rail]) -> None:
    """Closes the devices, each when its last user is gone."""
    for rail in rails:
        rail.device.close()
