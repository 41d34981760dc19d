"""In two guests on one wire: a rank in each, found by the route to the other; all the traffic of `guest_processes`.

GUEST says which of them this is; rank 0 is at 10.77.0.1.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import replace
from typing import Any

from guest_processes import exercise
from guest_rig import QUICK, main

from gfkernels.transport.meeting import Exchange
from gfkernels.transport.verbs.devices import choose, route_sources
from gfkernels.transport.verbs.settings import Settings
from gfkernels.transport.verbs.sysfs import scan

RANK = int(os.environ.get("GUEST", "0"))
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 5999
PATIENCE_S = 120.0


def _meet() -> socket.socket:
    if RANK == 0:
        with socket.create_server(("0.0.0.0", PORT)) as listener:
            listener.settimeout(PATIENCE_S)
            return listener.accept()[0]
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((ADDRESSES[0], PORT), timeout=5)
        except OSError:
            assert time.monotonic() < deadline, "the other guest does not come"
            time.sleep(0.2)


def _exchange(sock: socket.socket) -> Exchange:
    sock.settimeout(PATIENCE_S)
    pipe = sock.makefile("rwb")

    def exchange(value: object) -> list[Any]:
        pipe.write(json.dumps(value).encode() + b"\n")
        pipe.flush()
        theirs = json.loads(pipe.readline())
        return [value, theirs] if RANK == 0 else [theirs, value]

    return exchange


def by_route() -> None:
    """The port to the other guest is found by its address."""
    sources = route_sources([ADDRESSES[1 - RANK]], [("eth0", ADDRESSES[RANK])])
    assert sources == [("eth0", ADDRESSES[RANK])]
    (choice,) = choose(scan(), Settings(), sources)
    assert choice.gid is not None and choice.gid.address == ADDRESSES[RANK] and "eth0" in choice.why


def over_the_wire() -> None:
    """Frames, writes, and through pyverbs."""
    with _meet() as sock:
        exchange = _exchange(sock)
        exercise(RANK, 2, exchange, QUICK, register=False)
        exercise(RANK, 2, exchange, QUICK, register=True)
        exercise(RANK, 2, exchange, replace(QUICK, reference=True), register=True)
        exchange("done")


if __name__ == "__main__":
    sys.exit(main(by_route, over_the_wire))
