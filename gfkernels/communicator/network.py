"""Owns which network carries a group whose ranks do not share memory: RDMA where all of them can, else TCP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gfkernels.bootstrap import interface_addresses
from gfkernels.communicator.site import Site
from gfkernels.config import Config
from gfkernels.errors import ConnectError, UnavailableError
from gfkernels.trace import log
from gfkernels.transport.framed import FramedChannels
from gfkernels.transport.meeting import Exchange

if TYPE_CHECKING:
    from gfkernels.transport.verbs.rail import Rail
    from gfkernels.transport.verbs.settings import Settings

_PROBE_S: Final = 30.0
"""A probe takes microseconds; a card whose packets are lost says so after all retries, in seconds."""


def connect(rank: int, size: int, site: Site, config: Config, exchange: Exchange) -> tuple[str, FramedChannels]:
    """Connects the members of a group to each other. All of them call it.

    Returns:
        "verbs" or "tcp", and this rank's end.

    Raises:
        UnavailableError, ConnectError: the transport that was asked for cannot be had; says why.
    """
    if config.transport == "verbs" or (config.transport == "auto" and site.rdma_hoped):
        try:
            return "verbs", _verbs(rank, size, site, config, exchange)
        except (UnavailableError, ConnectError) as error:
            if config.transport == "verbs":
                raise
            site.rdma_hoped = False
            site.whys.append(f"verbs: {error}")
            log.info("RDMA is not used: %s", error)
    return "tcp", _tcp(rank, size, site, config, exchange)


def _verbs(rank: int, size: int, site: Site, config: Config, exchange: Exchange) -> FramedChannels:
    from gfkernels.transport.verbs import connect as verbs

    return verbs.connect(
        rank,
        size,
        exchange=exchange,
        rails=_rails(site),
        settings=_settings(config),
        timeout_s=min(config.connect_timeout_s, _PROBE_S),
    )


def _settings(config: Config) -> Settings:
    from gfkernels.transport.verbs.settings import Settings

    return Settings(
        device=config.verbs_device,
        gid_index=config.verbs_gid_index,
        timeout_exponent=config.verbs_timeout,
        retry_count=config.verbs_retry_count,
        traffic_class=config.verbs_traffic_class,
        service_level=config.verbs_service_level,
        reference=config.verbs_path == "pyverbs",
    )


def _rails(site: Site) -> Sequence[Rail] | UnavailableError:
    """The ports that all groups of this world use, or why there are none; what is found first stays."""
    from gfkernels.transport.verbs.rail import open_rails

    if site.rails is None:
        try:
            site.rails = open_rails(_settings(site.config), _sources(site))
        except UnavailableError as error:
            site.rails = error
    return site.rails


def _sources(site: Site) -> list[tuple[str, str]]:
    """(interface, address) of this host, those first from which the routes to the other hosts leave."""
    from gfkernels.transport.verbs.devices import route_sources

    return route_sources(site.elsewhere, interface_addresses(site.config.interface))


def _tcp(rank: int, size: int, site: Site, config: Config, exchange: Exchange) -> FramedChannels:
    from gfkernels.transport import tcp_connect

    return tcp_connect.connect(
        rank,
        size,
        exchange=exchange,
        secret=site.session.secret,
        addresses=[address for _, address in interface_addresses(config.interface)],
        bind=config.bind_address,
        timeout_s=config.connect_timeout_s,
    )
