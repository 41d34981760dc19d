"""Owns two network namespaces joined by a veth pair, for tests that need a wire between ranks on one machine."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

INTERFACE: Final = "gf0"
"""The wire's name in both namespaces."""

_count = itertools.count()


class NetnsError(RuntimeError):
    """A namespace could not be set up; the text is what `ip` said."""


@dataclass(frozen=True)
class Wire:
    """Two namespaces and the addresses by which they reach each other."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def command(self, side: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` inside one namespace."""
        return ["ip", "netns", "exec", self.names[side], *argv]

    def start(self, side: int, argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a process inside one namespace; stdout and stderr are pipes."""
        return subprocess.Popen(
            self.command(side, argv),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )

    def sent_nbytes(self, side: int) -> int:
        """Bytes that have left that namespace by the wire."""
        path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return int(_run(self.command(side, ["cat", path])))

    def shape(self, side: int, rate: str, burst: str = "64kb", latency: str = "50ms") -> None:
        """Limits what leaves one namespace with a token bucket; `rate` as tc has it, such as "200mbit"."""
        tbf = f"tc qdisc replace dev {INTERFACE} root tbf rate {rate} burst {burst} latency {latency}"
        _run(self.command(side, tbf.split()))

    def cut(self) -> None:
        """Takes the wire down: nothing passes, and no connection is closed."""
        _run(["ip", "-n", self.names[0], "link", "set", INTERFACE, "down"])


def available() -> tuple[bool, str]:
    """Whether namespaces can be made here, and why not."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return False, f"{tool} is not installed (package iproute2)"
    if os.geteuid() != 0:
        return False, "network namespaces need root"
    try:
        with wire() as made:
            made.shape(0, "100mbit")
    except NetnsError as error:
        return False, f"network namespaces cannot be made here: {error}"
    return True, ""


@contextmanager
def wire(rate: str | None = None) -> Iterator[Wire]:
    """Makes the namespaces, and removes them with all that is in them.

    Args:
        rate: limits both directions, such as "200mbit"; None: as fast as the machine.
    """
    number = next(_count)
    tag = f"gf{os.getpid()}x{number}"
    net = f"10.213.{number % 250}"
    made = Wire((f"{tag}a", f"{tag}b"), (f"{net}.1", f"{net}.2"))
    try:
        for name in made.names:
            _run(["ip", "netns", "add", name])
        ends = ["ip", "link", "add", INTERFACE, "netns", made.names[0], "type", "veth"]
        _run([*ends, "peer", "name", INTERFACE, "netns", made.names[1]])
        for name, address in zip(made.names, made.addresses, strict=True):
            _run(["ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE])
            for interface in ("lo", INTERFACE):
                _run(["ip", "-n", name, "link", "set", interface, "up"])
        if rate is not None:
            for side in (0, 1):
                made.shape(side, rate)
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetnsError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
