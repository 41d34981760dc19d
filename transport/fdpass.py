"""Owns handing file descriptors from every rank of a host to every other, between processes that share a secret.

One rank, the leader, listens on an abstract Unix socket; every other rank connects, both prove that they know the
secret, the rank hands in its descriptor, and gets those of all ranks back. That makes 2 (n - 1) transfers through n - 1
connections rather than n² of them.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import Final

from gfkernels.errors import ConnectError, PeerLostError
from gfkernels.transport.meeting import Exchange

_NONCE: Final = 32
_DIGEST: Final = 32
_HELLO: Final = struct.Struct("<8sI32s")
_MAGIC: Final = b"gfk-fd01"
_PER_MESSAGE: Final = 100  # the kernel takes at most 253 descriptors in one message
_HANDSHAKE_S: Final = 2.0  # how long a stranger may keep the leader busy
_CREDENTIALS: Final = struct.Struct("iII")


def share(
    fd: int, exchange: Exchange, *, secret: bytes, index: int, size: int, timeout_s: float = 30.0
) -> list[int | None]:
    """Gives `fd` to all ranks of the host and gets theirs. Every rank of the host calls this together.

    Args:
        fd: this rank's descriptor; stays open and the caller's.
        exchange: an all-gather among these ranks, called twice.
        secret: known to these ranks only.
        index: this rank's place among them.
        size: how many they are.
        timeout_s: for everything but `exchange`, which has its own deadline.

    Returns:
        A new descriptor (close-on-exec) for every rank, in order, which the caller has to close; None for itself.

    Raises:
        ConnectError: this rank failed, and has made both exchanges; nothing stays open.
    """
    if size == 1:
        return [None]
    deadline = time.monotonic() + timeout_s
    received: list[int | None] = [None] * size
    end: socket.socket | None = None
    name = failure = ""
    try:
        # Whatever fails here waits until after the exchanges, which all ranks have to make alike.
        try:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            name = _listen(end, size) if index == 0 else ""
        except OSError as error:
            failure = f"no Unix socket: {error}"
        name = exchange(name)[0]
        if index and end is not None:
            # A rank in another network namespace cannot see the leader's socket: all hear of it before anybody waits.
            failure = _connect(end, name, deadline) if name else "local rank 0 does not listen"
        failures = exchange(failure)
        if end is None or any(failures):
            raise ConnectError(_unreachable(failures))
        if index == 0:
            _lead(end, fd, received, secret, deadline)
        else:
            _follow(end, fd, received, secret, index, deadline)
    except BaseException:
        close_all(received)
        raise
    finally:
        if end is not None:
            end.close()
    return received


def close_all(descriptors: list[int | None]) -> None:
    """Closes what `share` returned; the list then holds only None."""
    for i, descriptor in enumerate(descriptors):
        if descriptor is not None:
            descriptors[i] = None
            os.close(descriptor)


def _unreachable(failures: list[str]) -> str:
    rows = "; ".join(f"local rank {i}: {failure}" for i, failure in enumerate(failures) if failure)
    return (
        f"ranks of one host could not reach local rank 0 through an abstract Unix socket: {rows}. They must run in one "
        "network namespace (container) to share memory"
    )


def _listen(end: socket.socket, size: int) -> str:
    name = f"gfkernels-{secrets.token_hex(16)}"
    end.bind(b"\0" + name.encode())
    end.listen(size + 8)
    return name


def _connect(end: socket.socket, name: str, deadline: float) -> str:
    try:
        _arm(end, deadline)
        end.connect(b"\0" + name.encode())
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


def _lead(listener: socket.socket, fd: int, received: list[int | None], secret: bytes, deadline: float) -> None:
    connections: dict[int, socket.socket] = {}
    size = len(received)
    try:
        while len(connections) < size - 1:
            _accept(listener, connections, received, secret, deadline)
        everyone = [fd if other is None else other for other in received]
        for index, connection in connections.items():
            # One rank after the other, each acknowledged: the kernel bounds the descriptors that are under way.
            _hand_out(connection, everyone, index, deadline)
    finally:
        for connection in connections.values():
            connection.close()


def _accept(
    listener: socket.socket,
    connections: dict[int, socket.socket],
    received: list[int | None],
    secret: bytes,
    deadline: float,
) -> None:
    """Takes one connection; a stranger's is dropped, and the wait goes on."""
    try:
        _arm(listener, deadline)
        connection, _ = listener.accept()
    except TimeoutError:
        missing = [i for i in range(1, len(received)) if i not in connections]
        raise ConnectError(f"local ranks {missing} did not hand in their shared memory in time") from None
    index, taken = 0, False
    try:
        _arm(connection, min(deadline, time.monotonic() + _HANDSHAKE_S))
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in (os.getuid(), 0):
            return
        index = _admit(connection, secret, len(received))
        if index in connections:
            return
        received[index] = _receive_fds(connection, 1, index)[0]
        connections[index], taken = connection, True
    except (OSError, ConnectError, PeerLostError):
        return
    finally:
        if not taken:
            connection.close()


def _admit(connection: socket.socket, secret: bytes, size: int) -> int:
    magic, index, theirs = _HELLO.unpack(_receive(connection, _HELLO.size))
    if magic != _MAGIC or not 0 < index < size:
        raise ConnectError("not one of our ranks")
    ours = os.urandom(_NONCE)
    connection.sendall(ours + _proof(secret, b"leader", index, theirs, ours))
    answer = _receive(connection, _DIGEST)
    if not hmac.compare_digest(answer, _proof(secret, b"member", index, theirs, ours)):
        raise ConnectError("wrong secret")
    return int(index)


def _follow(
    end: socket.socket, fd: int, received: list[int | None], secret: bytes, index: int, deadline: float
) -> None:
    try:
        _arm(end, deadline)
        ours = os.urandom(_NONCE)
        end.sendall(_HELLO.pack(_MAGIC, index, ours))
        answer = _receive(end, _NONCE + _DIGEST)
        theirs = answer[:_NONCE]
        if not hmac.compare_digest(answer[_NONCE:], _proof(secret, b"leader", index, ours, theirs)):
            raise ConnectError("local rank 0 does not know the job's secret; all ranks need the same GFKERNELS_SECRET")
        end.sendall(_proof(secret, b"member", index, ours, theirs))
        socket.send_fds(end, [b"F"], [fd])
        for start in range(0, len(received), _PER_MESSAGE):
            count = min(_PER_MESSAGE, len(received) - start)
            received[start : start + count] = _receive_fds(end, count, 0)
            end.sendall(b"A")
        own, received[index] = received[index], None
        if own is not None:
            os.close(own)
    except ConnectError:
        raise
    except TimeoutError:
        raise ConnectError("local rank 0 did not answer in time while the ranks exchanged shared memory") from None
    except (OSError, PeerLostError) as error:
        raise ConnectError(
            f"local rank 0 closed the connection while the ranks exchanged shared memory ({error}): it died, or holds "
            "another GFKERNELS_SECRET"
        ) from error


def _proof(secret: bytes, role: bytes, index: int, theirs: bytes, ours: bytes) -> bytes:
    message = b"\0".join([_MAGIC, role, str(index).encode()]) + theirs + ours
    return hmac.new(secret, message, hashlib.sha256).digest()


def _arm(end: socket.socket, deadline: float) -> None:
    end.settimeout(max(0.001, deadline - time.monotonic()))


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            raise PeerLostError("the connection was closed")
        data += part
    return data


def _receive_fds(connection: socket.socket, count: int, index: int) -> list[int | None]:
    """Exactly `count` descriptors, close-on-exec; none stays open where it were others."""
    # Not socket.recv_fds: between it and a later set_inheritable, an exec elsewhere would inherit them.
    descriptors = array.array("i")
    data, ancillary, flags, _ = connection.recvmsg(
        1, socket.CMSG_LEN(count * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) // descriptors.itemsize * descriptors.itemsize])
    if len(descriptors) != count or flags & socket.MSG_CTRUNC or not data:
        with suppress(OSError):
            for descriptor in descriptors:
                os.close(descriptor)
        if not data:
            raise PeerLostError("the connection was closed")
        raise ConnectError(
            f"{len(descriptors)} of {count} descriptors arrived from local rank {index}; this process may have too "
            "many open files (ulimit -n)"
        )
    return list(descriptors)


def _hand_out(connection: socket.socket, everyone: list[int], index: int, deadline: float) -> None:
    try:
        _arm(connection, deadline)
        for start in range(0, len(everyone), _PER_MESSAGE):
            socket.send_fds(connection, [b"F"], everyone[start : start + _PER_MESSAGE])
            _receive(connection, 1)
    except TimeoutError:
        raise ConnectError(f"local rank {index} did not take the host's shared memory in time") from None
    except (OSError, PeerLostError) as error:
        raise ConnectError(f"local rank {index} died while the ranks exchanged shared memory: {error}") from error
