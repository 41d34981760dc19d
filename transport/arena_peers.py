"""Owns seeing the arenas of the host's other ranks: their mappings here, and the proof that it is the same memory."""

from __future__ import annotations

import ctypes
import os
import secrets
from typing import Any, Final

from gfkernels.errors import ConnectError, GfkernelsError
from gfkernels.transport import arena_map, fdpass
from gfkernels.transport.arena import Arena
from gfkernels.transport.meeting import Exchange

_TOKEN: Final = 16


class PeerArenas:
    """Where every local rank's arena is in this process. The mappings outlive the ranks that own the memory.

    Attributes:
        addresses: first byte of every local rank's arena, in the order of local indices; ours is the arena's own.
        sizes: their lengths in bytes.
        index: our place among them.
    """

    def __init__(
        self, arena: Arena, exchange: Exchange, *, secret: bytes, index: int, size: int, timeout_s: float = 30.0
    ) -> None:
        """Maps them all. Every rank of the host calls this together; on a failure all of them raise.

        Args:
            arena: this rank's.
            exchange: all-gather of a small JSON value among the host's ranks, with a deadline of its own.
            secret: known to these ranks only.
            index: this rank's place among them.
            size: how many they are.
            timeout_s: for everything but `exchange`.

        Raises:
            ConnectError: a rank could not hand over or map an arena, or did not see what its owner wrote there: the
                ranks are not on one host. Nothing stays mapped or open.
        """
        self.index = index
        self._pid = os.getpid()
        self.addresses: list[int] = [0] * size
        self.sizes: list[int] = [0] * size
        self.addresses[index], self.sizes[index] = arena.address, arena.size
        try:
            failures = self._map_all(arena, exchange, secret, timeout_s)
            if any(failures):
                rows = [f"local rank {i}: {text}" for i, text in enumerate(failures) if text]
                said = failures[0] if len(set(failures)) == 1 else "; ".join(rows)
                raise ConnectError(f"the ranks of this host could not map each other's shared memory: {said}")
        except BaseException:
            self.close()
            raise

    def resolve(self, peer: int, offset: int, nbytes: int) -> int:
        """The address here of some bytes of a local rank's arena.

        Raises:
            ValueError: they are not in it.
        """
        if not 0 <= offset <= offset + nbytes <= self.sizes[peer]:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not in local rank {peer}'s {self.sizes[peer]}")
        return self.addresses[peer] + offset

    def close(self) -> None:
        """Unmaps the peers' arenas; no compiled code may be using them. Harmless when repeated or in a child."""
        if os.getpid() != self._pid:
            return
        for peer, address in enumerate(self.addresses):
            if peer != self.index and address:
                arena_map.unmap(address, self.sizes[peer])
                self.addresses[peer] = 0

    def _map_all(self, arena: Arena, exchange: Exchange, secret: bytes, timeout_s: float) -> list[str]:
        """Returns every rank's failure, "" where it had none. All ranks make the same exchanges, failed or not."""
        failure, token = "", None
        try:
            token = _Token(arena)
        except GfkernelsError as error:
            failure = str(error)
        try:
            facts = exchange({"failure": failure, "size": arena.size, **(token.facts if token else {})})
            if any(fact["failure"] for fact in facts):
                return [fact["failure"] for fact in facts]
            descriptors: list[int | None] = []
            try:
                descriptors = fdpass.share(
                    arena.fd, exchange, secret=secret, index=self.index, size=len(self.sizes), timeout_s=timeout_s
                )
                for peer, descriptor in enumerate(descriptors):
                    if descriptor is not None:
                        self._map(peer, descriptor, facts[peer])
            except (ConnectError, OSError) as error:
                failure = str(error)
            finally:
                fdpass.close_all(descriptors)
            return exchange(failure)
        finally:
            if token is not None:
                token.release()

    def _map(self, peer: int, descriptor: int, facts: dict[str, Any]) -> None:
        size = arena_map.sealed_size(descriptor)
        if size == 0 or size != facts["size"]:
            raise ConnectError(
                f"local rank {peer} handed over {size} bytes that cannot shrink, but announced {facts['size']}"
            )
        self.addresses[peer], self.sizes[peer] = arena_map.map_shared(descriptor, size), size
        seen = ctypes.string_at(self.resolve(peer, int(facts["offset"]), _TOKEN), _TOKEN)
        if seen.hex() != facts["token"]:
            raise ConnectError(f"local rank {peer}'s memory does not hold what it wrote there: it is not on this host")


class _Token:
    """Random bytes in our arena while our peers look for them."""

    def __init__(self, arena: Arena) -> None:
        value = secrets.token_bytes(_TOKEN)
        self._block = arena.allocate(_TOKEN)
        ctypes.memmove(self._block.address, value, _TOKEN)
        self.facts = {"offset": self._block.offset, "token": value.hex()}

    def release(self) -> None:
        """Gives the bytes back."""
        self._block.release()
