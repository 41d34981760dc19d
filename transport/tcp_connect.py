"""Owns how the ranks of a group find and connect to each other over TCP: addresses, listeners, and a full mesh.

Every rank listens on a port of its own and connects to all lower ranks, so each pair has one connection. All
handshakes run side by side in one loop: a stranger that connects and stays silent delays nobody.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gfkernels.errors import ConnectError
from gfkernels.trace import log
from gfkernels.transport.meeting import Exchange, family, route_source
from gfkernels.transport.tcp import TcpChannels, channels, tune
from gfkernels.transport.tcp_frames import VERSION
from gfkernels.transport.tcp_handshake import Handshake, HandshakeError, Identity, as_client, as_server

_ATTEMPT_S: Final = 5.0
"""One address gets this long before the next is tried; doubled every time round."""
_STRANGER_S: Final = 5.0
_RETRY_S: Final = 0.05


def connect(
    rank: int,
    size: int,
    *,
    exchange: Exchange,
    secret: bytes,
    addresses: Sequence[str] = (),
    bind: str | None = None,
    timeout_s: float = 120.0,
) -> TcpChannels:
    """Connects this rank to all others of its group. All ranks must call it.

    Args:
        rank: this rank within the group.
        size: ranks in the group.
        exchange: called twice, by all ranks.
        secret: what all ranks of the job know and nobody else.
        addresses: this host's addresses, best first, where ranks are on several hosts. Those that others reach by
            their routes come first; ones that another host has too (a container bridge) are left out.
        bind: listen on, and connect from, this address only.
        timeout_s: for everything after the exchanges.

    Raises:
        ConnectError: a peer cannot be reached, or did not reach this rank; names ranks, addresses and reasons.
    """
    if size == 1:
        return channels(rank, size, {})
    candidates = [bind] if bind else list(addresses)
    nonce = os.urandom(16).hex()
    people = exchange({"version": VERSION, "stack": _network_stack(), "addresses": candidates, "nonce": nonce})
    for other, person in enumerate(people):
        if person["version"] != VERSION:
            raise ConnectError(
                f"rank {other} speaks version {person['version']} of the TCP transport and rank {rank} version "
                f"{VERSION}: install the same release of gfkernels on all hosts"
            )
    here = [person["stack"] == people[rank]["stack"] for person in people]
    elsewhere = [a for person, same in zip(people, here, strict=True) if not same for a in person["addresses"]]
    if all(here) and not bind:
        published = ["127.0.0.1"]
    else:
        published = _ranked(candidates, elsewhere)
        if not published:
            raise ConnectError(
                f"the ranks are on several hosts and rank {rank} has no address that others could reach: its "
                f"interfaces gave {candidates or 'none'}. Set GFKERNELS_INTERFACE to the one that connects the hosts"
            )
    with _listen(rank, published, everywhere=not bind and not all(here)) as listener:
        port = int(listener.getsockname()[1])
        log.debug("TCP: others reach this rank at %s, port %d", ", ".join(published), port)
        offers = exchange({"addresses": published, "port": port, "loopback": not bind})
        context = hashlib.sha256(json.dumps([people, offers], sort_keys=True).encode()).digest()
        targets: dict[int, list[tuple[str, int]]] = {}
        for peer, offer in enumerate(offers[:rank]):
            hosts = ["127.0.0.1"] if here[peer] and offer["loopback"] else []
            hosts += [host for host in offer["addresses"] if here[peer] or host not in candidates]
            targets[peer] = [(host, int(offer["port"])) for host in dict.fromkeys(hosts)]
        sockets = _Mesh(Identity(rank, size, context, secret), listener, targets, bind).run(timeout_s)
    for peer, sock in sorted(sockets.items()):
        tune(sock)
        log.debug("TCP: rank %d is at %s, reached from %s", peer, sock.getpeername()[0], sock.getsockname()[0])
    return channels(rank, size, sockets)


def _network_stack() -> str:
    """Equal for two ranks exactly where the loopback interface of one is that of the other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _ranked(own: Sequence[str], others: Sequence[str]) -> list[str]:
    """`own` addresses, those first from which the routes to `others` leave; without those that others have as well."""
    uses = dict.fromkeys((a for a in own if a not in others), 0)
    for address in others:
        source = route_source(address)
        if source in uses:
            uses[source] += 1
    return sorted(uses, key=lambda a: -uses[a])


def _listen(rank: int, addresses: Sequence[str], *, everywhere: bool) -> socket.socket:
    try:
        if everywhere and socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        address = "" if everywhere else addresses[0]
        return socket.create_server((address, 0), family=family(address), backlog=1024)
    except OSError as error:
        raise ConnectError(
            f"rank {rank} cannot listen on {addresses[0]} ({error.strerror}): it must be an address of this host"
        ) from None


class _Talk:
    """One connection until its handshake is over."""

    def __init__(self, sock: socket.socket, steps: Handshake, until: float, peer: int | None) -> None:
        self.sock = sock
        self.steps = steps
        self.until = until
        self.peer = peer
        """Whom we connected to; None where we accepted."""
        self.connecting = peer is not None
        self.got = b""
        self.want = -1

    def step(self) -> int | None:
        """Goes on as far as what has arrived allows; the peer's rank once it has proven it."""
        if self.connecting:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self.connecting = False
        try:
            if self.want < 0:
                self._advance(None)
            while True:
                if len(self.got) == self.want:
                    self._advance(self.got)
                    continue
                try:
                    data = self.sock.recv(self.want - len(self.got))
                except BlockingIOError:
                    return None
                if not data:
                    raise HandshakeError("it closed the connection: it refused this rank, or ended")
                self.got += data
        except StopIteration as done:
            return int(done.value)

    def _advance(self, data: bytes | None) -> None:
        out, self.want = next(self.steps) if data is None else self.steps.send(data)
        self.got = b""
        # A handshake's messages are far smaller than the buffer of a fresh socket.
        if out and self.sock.send(out) != len(out):
            raise HandshakeError("it does not read")


class _Mesh:
    """Makes the connections of one rank: connects to `targets`, and accepts all higher ranks."""

    def __init__(
        self, me: Identity, listener: socket.socket, targets: dict[int, list[tuple[str, int]]], bind: str | None
    ) -> None:
        self._me = me
        self._listener = listener
        self._targets = targets
        self._bind = bind
        self._selector = selectors.DefaultSelector()
        self._talks: dict[int, _Talk] = {}
        self._ready: dict[int, socket.socket] = {}
        self._tries = dict.fromkeys(targets, 0)
        self._retry_at = dict.fromkeys(targets, 0.0)
        self._failures: dict[int | None, dict[str, str]] = {}

    def run(self, timeout_s: float) -> dict[int, socket.socket]:
        """Connected, authenticated sockets by peer."""
        deadline = time.monotonic() + timeout_s
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        complete = False
        try:
            while len(self._ready) < self._me.size - 1:
                now = time.monotonic()
                if now >= deadline:
                    raise self._error(timeout_s)
                self._start_attempts(now, deadline)
                for key, _ in self._selector.select(_RETRY_S):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._step(key.data)
                self._expire(time.monotonic())
            complete = True
        finally:
            self._selector.close()
            for talk in self._talks.values():
                talk.sock.close()
            if not complete:
                for sock in self._ready.values():
                    sock.close()
        return self._ready

    def _start_attempts(self, now: float, deadline: float) -> None:
        trying = {talk.peer for talk in self._talks.values()}
        for peer, places in self._targets.items():
            if peer in self._ready or peer in trying or now < self._retry_at[peer] or not places:
                continue
            lap, index = divmod(self._tries[peer], len(places))
            self._tries[peer] += 1
            host, port = places[index]
            sock = socket.socket(family(host), socket.SOCK_STREAM)
            sock.setblocking(False)
            until = min(deadline, now + _ATTEMPT_S * 2 ** min(lap, 6))
            talk = _Talk(sock, as_client(self._me, peer), until, peer)
            try:
                if self._bind:
                    sock.bind((self._bind, 0))
                sock.connect((host, port))
            except BlockingIOError:
                pass
            except OSError as error:
                self._fail(talk, error, f"{host} port {port}")
                continue
            self._watch(talk, selectors.EVENT_WRITE)

    def _watch(self, talk: _Talk, events: int) -> None:
        self._talks[talk.sock.fileno()] = talk
        self._selector.register(talk.sock, events, talk)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            sock.setblocking(False)
            self._watch(_Talk(sock, as_server(self._me), time.monotonic() + _STRANGER_S, None), selectors.EVENT_READ)

    def _step(self, talk: _Talk) -> None:
        was_connecting = talk.connecting
        try:
            peer = talk.step()
        except (OSError, HandshakeError) as error:
            self._fail(talk, error, self._place(talk))
            return
        if peer is not None:
            self._forget(talk)
            # A client that gave up on an earlier connection has proven itself again: the newer one is in use.
            old = self._ready.pop(peer, None)
            if old is not None:
                old.close()
            self._ready[peer] = talk.sock
        elif was_connecting:
            self._selector.modify(talk.sock, selectors.EVENT_READ, talk)

    def _expire(self, now: float) -> None:
        for talk in [t for t in self._talks.values() if t.until <= now]:
            self._fail(talk, TimeoutError(0, "no answer in time"), self._place(talk))

    def _place(self, talk: _Talk) -> str:
        if talk.peer is not None:
            places = self._targets[talk.peer]
            host, port = places[(self._tries[talk.peer] - 1) % len(places)]
            return f"{host} port {port}"
        try:
            return f"a connection from {talk.sock.getpeername()[0]}"
        except OSError:
            return "a connection"

    def _forget(self, talk: _Talk) -> None:
        if self._talks.pop(talk.sock.fileno(), None) is not None:
            self._selector.unregister(talk.sock)

    def _fail(self, talk: _Talk, error: Exception, place: str) -> None:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self._failures.setdefault(talk.peer, {})[place] = reason
        log.debug("TCP: %s: %s", place, reason)
        self._forget(talk)
        talk.sock.close()
        if talk.peer is not None:
            self._retry_at[talk.peer] = time.monotonic() + _RETRY_S

    def _error(self, timeout_s: float) -> ConnectError:
        me = self._me.rank
        for peer, places in self._targets.items():
            if peer not in self._ready:
                tried = self._failures.get(peer, {})
                text = ", ".join(f"{host} port {port}" for host, port in places) or "no address"
                reasons = "; ".join(f"{place}: {reason}" for place, reason in tried.items()) or "no answer"
                return ConnectError(
                    f"rank {me} could not connect to rank {peer} in {timeout_s:g} s (tried {text}; {reasons}). Let TCP "
                    "between the hosts through the firewall, or set GFKERNELS_INTERFACE to the one that connects them"
                )
        missing = [peer for peer in range(me + 1, self._me.size) if peer not in self._ready]
        refused = "".join(f"; {place} was refused: {reason}" for place, reason in self._failures.get(None, {}).items())
        return ConnectError(
            f"rank {missing[0]} did not connect to rank {me} in {timeout_s:g} s (listening on "
            f"{self._listener.getsockname()[:2]}{refused}). Let TCP between the hosts through the firewall, or set "
            "GFKERNELS_INTERFACE to the interface that connects them"
        )
