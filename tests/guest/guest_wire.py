"""Owns the virtual Ethernet between two guests: one pair of connected sockets for each rail."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Final

N_ENDS: Final = 2


class Wire:
    """What two guests are plugged into, idents 0 and 1. Each end can be taken once: a new boot needs a new wire."""

    def __init__(self, *, mtu: int = 1500, n_rails: int = 1) -> None:
        """Makes the wire.

        Args:
            mtu: of the guests' interfaces, in bytes; 4200 or more give rxe its largest path MTU.
            n_rails: parallel wires: eth0 and rxe0, eth1 and rxe1…
        """
        self.mtu, self.n_rails = mtu, n_rails
        pairs = [socket.socketpair() for _ in range(n_rails)]
        self._ends: list[list[socket.socket]] = [[pair[ident] for pair in pairs] for ident in range(N_ENDS)]

    @staticmethod
    def address(ident: int, rail: int = 0) -> str:
        """A guest's IPv4 address."""
        return f"10.77.{rail}.{ident + 1}"

    def take(self, ident: int) -> list[socket.socket]:
        """One end, for the guest that closes it."""
        ends, self._ends[ident] = self._ends[ident], []
        if len(ends) != self.n_rails:
            raise ValueError(f"end {ident} of this wire has been taken: a guest that boots again needs a new wire")
        return ends

    def close(self) -> None:
        """Closes the ends that nobody has taken."""
        for ends in self._ends:
            while ends:
                ends.pop().close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
