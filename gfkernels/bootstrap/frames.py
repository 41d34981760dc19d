"""Owns the format on bootstrap connections: a length in four bytes, then JSON; and the proofs of the secret."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from dataclasses import dataclass
from typing import Any, Final

PROTOCOL: Final = 1
"""Raised with every change that an older peer would misunderstand."""
MAX_FRAME: Final = 16 << 20
"""Bytes one frame may have once the sender has proved that it belongs here."""
MAX_GREETING: Final = 4096
"""Bytes one frame may have before that."""
_LENGTH: Final = struct.Struct(">I")


class FrameError(ValueError):
    """What arrived is not a frame of ours."""


def encode(message: Any, limit: int = MAX_FRAME) -> bytes:
    """One message as bytes on the wire.

    Raises:
        FrameError: the message is longer than a peer would accept.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > limit:
        raise FrameError(f"a message of {len(body)} bytes is longer than the {limit} that the store takes")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into messages; `limit` may be raised once the peer is known."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def wanted(self) -> int:
        """How many bytes are still missing from the frame at hand (from its length, while that is incomplete)."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size - len(self._buffer)
        return _LENGTH.size + int(_LENGTH.unpack_from(self._buffer)[0]) - len(self._buffer)

    def feed(self, data: bytes) -> list[Any]:
        """Adds received bytes and returns the messages that are complete now.

        Raises:
            FrameError: a length above the limit, or a body that is not JSON.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._buffer)
            if nbytes > self.limit:
                raise FrameError(f"a frame announces {nbytes} bytes where {self.limit} are allowed")
            end = _LENGTH.size + nbytes
            if len(self._buffer) < end:
                break
            try:
                messages.append(json.loads(self._buffer[_LENGTH.size : end]))
            except (ValueError, RecursionError) as error:
                raise FrameError(f"a frame of {nbytes} bytes is not JSON ({error})") from None
            del self._buffer[:end]
        return messages


@dataclass(frozen=True)
class Greeting:
    """What the server says first; nothing in it is secret."""

    job: str
    session: str
    nonce: str

    @classmethod
    def fresh(cls, job: str, session: str) -> Greeting:
        """A greeting with a nonce of its own."""
        return cls(job, session, secrets.token_hex(16))

    def message(self) -> dict[str, Any]:
        """The greeting as a frame's content."""
        return {"gfkernels": PROTOCOL, "job": self.job, "session": self.session, "nonce": self.nonce}

    @classmethod
    def parse(cls, message: Any) -> Greeting:
        """Reads a greeting.

        Raises:
            FrameError: it is not one, or of another protocol version.
        """
        if not isinstance(message, dict) or "gfkernels" not in message:
            raise FrameError("it does not greet like a gfkernels store")
        if message["gfkernels"] != PROTOCOL:
            raise FrameError(
                f"it speaks version {message['gfkernels']} of the protocol and this rank version {PROTOCOL}"
            )
        fields = [message.get(name) for name in ("job", "session", "nonce")]
        if not all(isinstance(field, str) for field in fields):
            raise FrameError("its greeting is incomplete")
        return cls(*[str(field) for field in fields])


def proof(secret: bytes, side: str, greeting: Greeting, nonce: str, rank: int, size: int, role: str) -> str:
    """The HMAC by which a side shows that it knows the secret.

    `side` is part of it, so that neither side's proof can be sent back to it as the other's.
    """
    fields = (side, str(PROTOCOL), greeting.job, greeting.session, greeting.nonce, nonce, str(rank), str(size), role)
    text = json.dumps(fields).encode()
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def same_proof(expected: str, received: Any) -> bool:
    """Compares proofs in constant time."""
    return isinstance(received, str) and hmac.compare_digest(expected.encode(), received.encode())


def session_key(secret: bytes, job: str, session: str) -> bytes:
    """The key of one session (32 bytes), from which data listeners authenticate; it never travels."""
    return hmac.new(secret, json.dumps(["session key", job, session]).encode(), hashlib.sha256).digest()
