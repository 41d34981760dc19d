"""Owns what ranks need before they are connected: an exchange among them, and by which address a route leaves."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

Exchange = Callable[[Any], "list[Any]"]
"""An allgather of one JSON value a rank among all ranks of the group, in rank order."""


def family(address: str) -> socket.AddressFamily:
    """Of an IP address in text."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def route_source(address: str) -> str | None:
    """This host's address from which the route to another one leaves; None where there is none."""
    try:
        with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None
