"""Owns how two ranks prove to each other over a fresh connection who they are, as coroutines that do no I/O themselves.

    client -> server   hello:   version, both ranks, context, nonce
    server -> client   reply:   version, rank, nonce, HMAC over both nonces
    client -> server   proof:   HMAC over both nonces
    server -> client   welcome

The context is a hash of what all ranks exchanged, so connections of another group or job are told apart even where they
share the secret. Neither side sends anything that depends on the secret before the other has named its nonce, and the
two HMACs have different labels, so an answer cannot be reflected.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

from gfkernels.transport.tcp_frames import VERSION

_MAGIC: Final = b"GFKERNEL"
_HELLO: Final = struct.Struct("<8sIII32s32s")
_REPLY: Final = struct.Struct("<8sII32s32s")
_WELCOME: Final = b"WELCOME!"

Handshake = Generator[tuple[bytes, int], bytes, int]
"""Yields (bytes to send, how many bytes to receive next), is sent those bytes, returns the peer's rank."""


class HandshakeError(Exception):
    """The other side is not the rank it should be; the text says what was seen and expected."""


@dataclass(frozen=True)
class Identity:
    """What this rank proves: its rank in a group of `size`, the group's context, and the shared secret."""

    rank: int
    size: int
    context: bytes
    secret: bytes

    def mac(self, label: bytes, client: int, server: int, client_nonce: bytes, server_nonce: bytes) -> bytes:
        """The HMAC of one side."""
        ranks = struct.pack("<III", VERSION, client, server)
        message = label + ranks + self.context + client_nonce + server_nonce
        return hmac.new(self.secret, message, hashlib.sha256).digest()


def as_client(me: Identity, server: int) -> Handshake:
    """The side that connected, to rank `server`."""
    nonce = secrets.token_bytes(32)
    hello = _HELLO.pack(_MAGIC, VERSION, me.rank, server, me.context, nonce)
    reply = yield hello, _REPLY.size
    magic, version, rank, server_nonce, mac = _REPLY.unpack(reply)
    _check_version(magic, version)
    if rank != server:
        raise HandshakeError(f"rank {rank} answered, expected rank {server}")
    if not hmac.compare_digest(mac, me.mac(b"server", me.rank, server, nonce, server_nonce)):
        raise HandshakeError("it does not know the secret of this job")
    welcome = yield me.mac(b"client", me.rank, server, nonce, server_nonce), len(_WELCOME)
    if welcome != _WELCOME:
        raise HandshakeError("it did not accept this rank")
    return server


def as_server(me: Identity) -> Handshake:
    """The side that accepted; whoever proves to be a rank of the group is let in."""
    hello = yield b"", _HELLO.size
    magic, version, client, server, context, nonce = _HELLO.unpack(hello)
    _check_version(magic, version)
    if server != me.rank or not 0 <= client < me.size or client == me.rank:
        raise HandshakeError(f"rank {client} asked for rank {server}; this is rank {me.rank} of {me.size}")
    if not hmac.compare_digest(context, me.context):
        raise HandshakeError(f"rank {client} belongs to another group or job")
    own_nonce = secrets.token_bytes(32)
    reply = _REPLY.pack(_MAGIC, VERSION, me.rank, own_nonce, me.mac(b"server", client, me.rank, nonce, own_nonce))
    proof = yield reply, hashlib.sha256().digest_size
    if not hmac.compare_digest(proof, me.mac(b"client", client, me.rank, nonce, own_nonce)):
        raise HandshakeError(f"who calls itself rank {client} does not know the secret of this job")
    yield _WELCOME, 0
    return client


def _check_version(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise HandshakeError(f"it speaks another protocol (starts with {magic!r})")
    if version != VERSION:
        raise HandshakeError(
            f"it speaks version {version} of the protocol, this rank {VERSION}: install the same release"
        )
