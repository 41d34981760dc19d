"""Owns the store's server: one thread in rank 0 that keeps keys, answers waits, and passes control events on."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from gfkernels.bootstrap.forks import close_in_child
from gfkernels.bootstrap.frames import (
    MAX_FRAME,
    MAX_GREETING,
    FrameError,
    FrameReader,
    Greeting,
    encode,
    proof,
    same_proof,
)
from gfkernels.bootstrap.network import keep_alive
from gfkernels.bootstrap.tables import Tables
from gfkernels.trace import log

_GREETING_S: Final = 10.0
"""How long a connection may take to prove itself."""
_MAX_STRANGERS: Final = 256
"""Connections that have not proved themselves yet; the oldest go first."""
_MAX_BACKLOG_BYTES: Final = 4 * MAX_FRAME
"""Answers that a client may leave unread before it is dropped."""
_FLUSH_S: Final = 1.0
_MAX_REFUSALS: Final = 16


class Connection:
    """One accepted socket: what is read, what waits to be written, and who is at the other end."""

    def __init__(self, sock: socket.socket, greeting: Greeting) -> None:
        self.sock = close_in_child(sock)
        self.greeting = greeting
        self.reader = FrameReader(MAX_GREETING)
        self.out = bytearray()
        self.rank = -1
        self.role = ""
        self.leaving = False
        self.closing = False
        self.deadline = time.monotonic() + _GREETING_S

    def known_as(self, rank: int, role: str) -> None:
        """Marks the peer as a member."""
        self.rank, self.role = rank, role
        self.reader.limit = MAX_FRAME


class StoreServer:
    """The store of one world. `close` stops its thread; the thread is a daemon and never holds up an exit.

    Args:
        listeners: bound and listening sockets; the server owns them from here on.
        job: the job id with generation, told to everyone who connects.
        secret: what a client must know.
        size: number of ranks.
    """

    def __init__(self, listeners: Iterable[socket.socket], job: str, secret: bytes, size: int) -> None:
        self.session = secrets.token_hex(16)
        self.job = job
        self.size = size
        self.refusals: list[str] = []
        self._secret = secret
        self._listeners = [close_in_child(sock) for sock in listeners]
        self._selector = close_in_child(selectors.DefaultSelector())
        self._connections: set[Connection] = set()
        self._controls: dict[int, Connection] = {}
        self._gone: dict[int, str] = {}
        self._tables = Tables(self._send)
        self._wake, waker = socket.socketpair()
        self._waker = close_in_child(waker)
        close_in_child(self._wake).setblocking(False)
        self._closing = False
        for sock in self._listeners:
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, "listener")
        self._selector.register(self._wake, selectors.EVENT_READ, "wake")
        self._thread = threading.Thread(target=self._run, name="gfkernels-store", daemon=True)

    def start(self) -> None:
        """Begins to serve; connections of `adopt` come before."""
        self._thread.start()

    def adopt(self, rank: int, role: str) -> socket.socket:
        """A connected socket for a client in this process; only before `start`."""
        ours, theirs = socket.socketpair()
        connection = self._accepted(ours)
        connection.known_as(rank, role)
        self._joined(connection)
        return theirs

    def close(self) -> None:
        """Tells everyone that rank 0 left, flushes for at most a second, and joins the thread."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_FLUSH_S + 2.0)
        elif not self._thread.ident:
            self._release()

    # Everything below runs in the server's thread (or before it starts).

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(self._next_deadline()):
                    self._handle(key, events)
                self._expire()
            self._say_goodbye()
        except Exception:
            log.exception("the store's thread in rank 0 failed; every rank will see rank 0 as lost")
        finally:
            self._release()

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.data == "wake":
            with contextlib.suppress(OSError):
                self._wake.recv(64)
        elif key.data == "listener":
            with contextlib.suppress(OSError):
                sock, _ = key.fileobj.accept()  # type: ignore[union-attr]
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    keep_alive(sock)
                self._greet(self._accepted(sock))
        elif key.data in self._connections:
            connection: Connection = key.data
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ and connection in self._connections:
                self._read(connection)

    def _accepted(self, sock: socket.socket) -> Connection:
        sock.setblocking(False)
        connection = Connection(sock, Greeting.fresh(self.job, self.session))
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def _greet(self, connection: Connection) -> None:
        strangers = [c for c in self._connections if c.rank < 0]
        if len(strangers) > _MAX_STRANGERS:
            self._drop(min(strangers, key=lambda c: c.deadline))
        self._send(connection, connection.greeting.message())

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        try:
            for message in connection.reader.feed(data):
                if connection not in self._connections:
                    return
                if connection.rank < 0:
                    self._authenticate(connection, message)
                else:
                    self._message(connection, message)
        except (FrameError, KeyError, TypeError, ValueError) as error:
            log.warning("the store drops a connection (rank %d) that sent nonsense: %s", connection.rank, error)
            self._drop(connection)

    def _authenticate(self, connection: Connection, message: Any) -> None:
        rank, size, role, nonce = (message[name] for name in ("rank", "size", "role", "nonce"))
        if not (isinstance(rank, int) and isinstance(nonce, str) and role in ("store", "control")):
            raise FrameError(f"an answer to the greeting with rank {rank!r} and role {role!r}")
        greeting = connection.greeting
        if not same_proof(proof(self._secret, "client", greeting, nonce, rank, size, role), message["proof"]):
            self._refuse(connection, f"rank {rank}: the secrets differ")
        elif size != self.size or not 0 <= rank < self.size:
            self._refuse(connection, f"rank 0 has a world of {self.size} ranks, this is rank {rank} of {size}")
        elif rank in self._gone:
            self._refuse(connection, f"rank {rank} of this session is gone ({self._gone[rank]}): all start together")
        elif any(c.rank == rank and c.role == role for c in self._connections):
            self._refuse(connection, f"another process is already rank {rank}")
        else:
            connection.known_as(rank, role)
            answer = proof(self._secret, "server", greeting, nonce, rank, size, role)
            self._send(connection, {"welcome": True, "proof": answer})
            self._joined(connection)

    def _refuse(self, connection: Connection, why: str) -> None:
        # A client tries again for a while; one line for each reason is enough.
        if why not in self.refusals and len(self.refusals) < _MAX_REFUSALS:
            self.refusals.append(why)
            log.warning("the store refused a connection: %s", why)
        connection.closing = True
        self._send(connection, {"refused": True, "why": why})

    def _joined(self, connection: Connection) -> None:
        if connection.role == "control":
            self._controls[connection.rank] = connection
            for rank, event in self._gone.items():
                self._send(connection, {"event": event, "rank": rank})

    def _message(self, connection: Connection, message: Any) -> None:
        if connection.role == "store":
            self._tables.request(connection, message)
        elif message.get("goodbye"):
            connection.leaving = True
        else:
            self._broadcast(message["post"], connection.rank, message.get("to"))

    def _broadcast(self, event: Any, sender: int, to: list[int] | None = None) -> None:
        # Rank 0 comes last: it may end at the news, and the server with it, before the others have heard the cause.
        for rank, connection in sorted(self._controls.items(), reverse=True):
            if rank != sender if to is None else rank in to:
                self._send(connection, event)

    def _send(self, connection: Connection, message: Any) -> None:
        if connection not in self._connections:
            return
        connection.out += encode(message)
        self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            while connection.out:
                sent = connection.sock.send(connection.out)
                del connection.out[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._drop(connection)
            return
        if len(connection.out) > _MAX_BACKLOG_BYTES or (connection.closing and not connection.out):
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.out else 0)
        self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._tables.forget(connection)
        if connection.role == "control" and not self._closing:
            del self._controls[connection.rank]
            event = "left" if connection.leaving else "lost"
            self._gone[connection.rank] = event
            self._tables.gone(connection.rank, event)
            self._broadcast({"event": event, "rank": connection.rank}, connection.rank)

    def _next_deadline(self) -> float | None:
        deadlines = [c.deadline for c in self._connections if c.rank < 0]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in [c for c in self._connections if c.rank < 0 and c.deadline <= now]:
            self._drop(connection)

    def _say_goodbye(self) -> None:
        for sock in self._listeners:
            self._selector.unregister(sock)
            sock.close()
        end = time.monotonic() + _FLUSH_S
        self._read_what_came(end)
        self._tables.close()
        self._broadcast({"event": "left", "rank": 0}, 0)
        while any(c.out for c in self._connections) and time.monotonic() < end:
            for key, events in self._selector.select(0.05):
                if isinstance(key.data, Connection) and events & selectors.EVENT_WRITE:
                    self._flush(key.data)

    def _read_what_came(self, end: float) -> None:
        # Why rank 0 leaves may still lie in its own control connection: peers are to hear that, and only then that it
        # left. Everything that came before `close` is readable at once.
        while time.monotonic() < end:
            ready = [(key, events) for key, events in self._selector.select(0) if events & selectors.EVENT_READ]
            for key, events in ready:
                self._handle(key, events)
            if not ready:
                return

    def _release(self) -> None:
        for connection in list(self._connections):
            connection.sock.close()
        self._connections.clear()
        for sock in (*self._listeners, self._wake, self._waker):
            sock.close()
        self._selector.close()
