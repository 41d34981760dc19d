"""Owns addresses: which a name and this host have, binding rank 0's listener, keeping connections watched."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gfkernels.errors import BootstrapError, ConfigError

_SIOCGIFADDR: Final = 0x8915
_VIRTUAL: Final = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "tun", "tap", "podman")
_BACKLOG: Final = 1024


@dataclass(frozen=True)
class Endpoint:
    """One address to connect to."""

    family: int
    address: tuple[Any, ...]

    def __str__(self) -> str:
        host, port = self.address[0], self.address[1]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def resolve(host: str, port: int) -> list[Endpoint]:
    """Every stream address of a name; empty where it has none (yet)."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(Endpoint(int(family), tuple(address)) for family, _, _, _, address in found))


def listen(hosts: Sequence[str], ports: Iterable[int]) -> socket.socket:
    """A listener on the first port that is free on one of the names' addresses.

    Args:
        hosts: names or addresses of this host; "" means all of its addresses, IPv6 and IPv4.
        ports: tried in turn; 0 takes any.

    Raises:
        BootstrapError: none is free; names the addresses.
    """
    failures: list[str] = []
    for port in ports:
        for host in hosts:
            endpoints = resolve(host, port) if host else _everywhere(port)
            if not endpoints:
                failures.append(f"{host} (the name has no address)")
            for endpoint in endpoints:
                try:
                    return _bound(endpoint)
                except OSError as error:
                    failures.append(f"{endpoint} ({os.strerror(error.errno or errno.EINVAL)})")
    raise BootstrapError(
        f"rank 0 cannot listen on {', '.join(failures) or 'any port'}: choose another MASTER_PORT or store= address"
    )


def _everywhere(port: int) -> list[Endpoint]:
    dual = [Endpoint(int(socket.AF_INET6), ("::", port))] if socket.has_dualstack_ipv6() else []
    return [*dual, Endpoint(int(socket.AF_INET), ("0.0.0.0", port))]


def _bound(endpoint: Endpoint) -> socket.socket:
    everywhere = endpoint.address[0] == "::"
    return socket.create_server(
        endpoint.address[:2] if everywhere else endpoint.address,
        family=endpoint.family,
        backlog=_BACKLOG,
        dualstack_ipv6=everywhere,
    )


def interface_addresses(interface: str | None = None) -> list[tuple[str, str]]:
    """This host's addresses as (interface, address): physical ones first, virtual next, no loopback or link-local.

    Args:
        interface: only this one.

    Raises:
        ConfigError: the interface does not exist or has no address.
    """
    found: list[tuple[str, str]] = []
    names = [name for _, name in socket.if_nameindex()]
    if interface is not None and interface not in names:
        raise ConfigError(f"interface={interface!r} does not exist; this host has {', '.join(names)}")
    for name in names:
        if interface in (None, name) and (name != "lo" or interface == "lo"):
            found += [(name, address) for address in _addresses_of(name)]
    if interface is not None and not found:
        raise ConfigError(f"interface={interface!r} has no address")
    return sorted(found, key=lambda item: item[0].startswith(_VIRTUAL))


def _addresses_of(name: str) -> list[str]:
    addresses = []
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        addresses.append(socket.inet_ntoa(reply[20:24]))
    except (ImportError, OSError):
        pass
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        fields = line.split()
        # Field 3 is the scope: 0x20 is link-local, which needs a zone on every other host.
        if fields[5] == name and fields[3] != "20":
            addresses.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
    return addresses


def keep_alive(sock: socket.socket) -> None:
    """Has the kernel notice within half a minute that the other host is gone, where the connection is idle."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
