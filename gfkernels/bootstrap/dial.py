"""Owns how a client finds rank 0: it tries every candidate at once and takes only the one that proves the secret."""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gfkernels.bootstrap.frames import MAX_GREETING, FrameError, FrameReader, Greeting, encode, proof, same_proof
from gfkernels.bootstrap.network import Endpoint, keep_alive
from gfkernels.errors import BootstrapError

_ATTEMPT_S: Final = (1.0, 8.0)
"""How long a candidate may keep silent, at first and at most: a busy rank 0 may be slow, a stranger says nothing."""
_PAUSE_S: Final = (0.02, 0.5)
"""Pause between attempts on one candidate, at first and at most."""
_GRACE_S: Final = (2.0, 10.0)
"""How long a refusal by our own job may last before it is final: at one exact address, among several."""
_RESOLVE_S: Final = 1.0


@dataclass(frozen=True)
class Identity:
    """What a client says of itself, and what it expects of the server."""

    job: str
    secret: bytes
    rank: int
    size: int


class _Refused(Exception):
    """The server of our job does not take us."""


class _Candidate:
    """The attempts on one endpoint: connect, read the greeting, prove, check the server's proof."""

    def __init__(self, endpoint: Endpoint, identity: Identity, role: str) -> None:
        self.endpoint = endpoint
        self.sock: socket.socket | None = None
        self._seen = "no attempt yet"
        self._said = ""
        self.due = 0.0
        self.greeting: Greeting | None = None
        self._connected = False
        self._reader = FrameReader(MAX_GREETING)
        self._nonce = ""
        self._identity = identity
        self._role = role
        self._pause, self._patience = _PAUSE_S[0], _ATTEMPT_S[0]

    def start(self, now: float) -> None:
        self._connected = False
        self._reader = FrameReader(MAX_GREETING)
        self._nonce = secrets.token_hex(16)
        self.greeting = None
        self.due = now + self._patience
        try:
            self.sock = socket.socket(self.endpoint.family, socket.SOCK_STREAM)
            self.sock.setblocking(False)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(self.sock)
            self.sock.connect(self.endpoint.address)
        except BlockingIOError:
            pass
        except OSError as error:
            self.stop(now, os.strerror(error.errno or 0))

    @property
    def seen(self) -> str:
        """What came of the attempts: a listener that is gone by now is still told by what it said."""
        return self._seen if self._said in ("", self._seen) else f"{self._said}; by now: {self._seen}"

    def stop(self, now: float, seen: str, *, said: bool = False) -> None:
        if self.sock is not None:
            self.sock.close()
        self.sock, self._seen = None, seen
        if said:
            self._said = seen
        self.due = now + self._pause
        self._pause = min(self._pause * 1.5, _PAUSE_S[1])

    def silent(self, now: float) -> None:
        what = "it accepts connections but says nothing" if self._connected else "it does not answer"
        self._patience = min(self._patience * 2, _ATTEMPT_S[1])
        self.stop(now, what)

    @property
    def events(self) -> int:
        return select.POLLIN if self._connected else select.POLLOUT

    def advance(self) -> bool:
        """Handles readiness; True once the server has proved itself.

        Raises:
            OSError, FrameError: it is not ours, or not there.
            _Refused: it is ours and refuses.
        """
        assert self.sock is not None
        if not self._connected:
            failure = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failure:
                raise OSError(failure, os.strerror(failure))
            self._connected = True
            return False
        # Not a byte more than this frame: what follows the welcome belongs to the store.
        try:
            data = self.sock.recv(self._reader.wanted())
        except (BlockingIOError, InterruptedError):
            return False
        if not data:
            raise ConnectionResetError("it closed the connection")
        messages = self._reader.feed(data)
        return bool(messages) and self._message(messages[0])

    def _message(self, message: Any) -> bool:
        me = self._identity
        fields = (self._nonce, me.rank, me.size, self._role)
        if self.greeting is None:
            self.greeting = Greeting.parse(message)
            if self.greeting.job != me.job:
                raise FrameError(f"it serves another job ({self.greeting.job!r}, not {me.job!r})")
            answer = {"rank": me.rank, "size": me.size, "role": self._role, "nonce": self._nonce}
            answer["proof"] = proof(me.secret, "client", self.greeting, *fields)
            assert self.sock is not None
            self.sock.send(encode(answer))
            return False
        if not isinstance(message, dict):
            raise FrameError("it does not speak our protocol")
        if "refused" in message:
            raise _Refused(str(message.get("why")))
        if not same_proof(proof(me.secret, "server", self.greeting, *fields), message.get("proof")):
            raise FrameError("it does not know the secret")
        return True


def dial(
    endpoints: Callable[[], Sequence[Endpoint]], where: str, identity: Identity, role: str, deadline: float
) -> tuple[socket.socket, Greeting, Endpoint]:
    """Connects to the server of this job, whenever it starts and whatever else listens next to it.

    Args:
        endpoints: the candidates; asked again while names may still appear.
        where: the address for messages.
        identity: who we are.
        role: "store" or "control".
        deadline: on the monotonic clock.

    Returns:
        The authenticated socket, the server's greeting, and the endpoint where it was found.

    Raises:
        BootstrapError: nobody there proved to be ours, with what was seen at each address.
    """
    candidates: dict[Endpoint, _Candidate] = {}
    resolve_at = 0.0
    refusal: tuple[float, str] | None = None
    try:
        while True:
            now = time.monotonic()
            if now >= resolve_at:
                for endpoint in endpoints():
                    candidates.setdefault(endpoint, _Candidate(endpoint, identity, role))
                resolve_at = now + _RESOLVE_S
            for candidate in candidates.values():
                if candidate.due <= now and candidate.sock is not None:
                    candidate.silent(now)
                if candidate.due <= now:
                    candidate.start(now)
            grace = _GRACE_S[0] if len(candidates) <= 2 else _GRACE_S[1]
            if now >= deadline or (refusal is not None and now >= refusal[0] + grace):
                raise BootstrapError(_nobody(identity, where, candidates, refusal))
            for candidate in _ready(candidates, min(deadline, resolve_at) - now):
                try:
                    if candidate.advance():
                        sock, candidate.sock = candidate.sock, None
                        assert sock is not None and candidate.greeting is not None
                        return sock, candidate.greeting, candidate.endpoint
                except _Refused as error:
                    candidate.stop(time.monotonic(), f"it refused: {error}", said=True)
                    refusal = refusal or (time.monotonic(), f"{candidate.endpoint} refused: {error}")
                except OSError as error:
                    candidate.stop(time.monotonic(), error.strerror or str(error))
                except (FrameError, KeyError, TypeError) as error:
                    candidate.stop(time.monotonic(), str(error), said=True)
    finally:
        for candidate in candidates.values():
            if candidate.sock is not None:
                candidate.sock.close()


def _ready(candidates: dict[Endpoint, _Candidate], seconds: float) -> list[_Candidate]:
    now = time.monotonic()
    waits = [candidate.due - now for candidate in candidates.values()]
    seconds = max(0.0, min([seconds, *waits]))
    active = {c.sock.fileno(): c for c in candidates.values() if c.sock is not None}
    if not active:
        time.sleep(max(seconds, 0.001))
        return []
    poller = select.poll()
    for descriptor, candidate in active.items():
        poller.register(descriptor, candidate.events)
    return [active[descriptor] for descriptor, _ in poller.poll(seconds * 1000 + 1)]


def _nobody(
    identity: Identity, where: str, candidates: dict[Endpoint, _Candidate], refusal: tuple[float, str] | None
) -> str:
    who = f"rank {identity.rank} of {identity.size} found no rank 0 at {where}"
    if refusal is not None:
        return f"{who}: {refusal[1]}. Check that all ranks have the same secret, size and distinct ranks"
    if not candidates:
        return f"{who}: the name has no address"
    groups: dict[str, list[str]] = {}
    for candidate in candidates.values():
        groups.setdefault(candidate.seen, []).append(str(candidate.endpoint))
    shown = [f"{', '.join(at[:3])}{' …' if len(at) > 3 else ''}: {seen}" for seen, at in groups.items()]
    return f"{who}: {'; '.join(shown)}. Is rank 0 running, and is the address right?"
