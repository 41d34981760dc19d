"""Owns the store as its clients see it: keys, blocking gets, all-gathers and barriers between the ranks of a world."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from gfkernels.bootstrap.forks import close_in_child
from gfkernels.bootstrap.frames import FrameError, FrameReader, encode
from gfkernels.errors import BootstrapError, PeerLostError, UsageError

_SLICE_S: Final = 0.05
"""How long one thread reads for all before it looks whether its own answer has come."""
_CANCEL_S: Final = 5.0


class StoreTimeout(BootstrapError, TimeoutError):
    """A wait on the store ran out.

    Attributes:
        missing: the keys that do not exist, or, of a gather, the ranks that have not contributed.
    """

    def __init__(self, message: str, missing: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.missing = list(missing)


class Store(Protocol):
    """What the ranks of a world share while they set up. Values are JSON: bytes travel as hex strings.

    Every wait takes `timeout` in seconds (None: the store's own, from the configuration). Methods may be called from
    several threads.
    """

    def set(self, key: str, value: Any) -> None:
        """Puts a value, replacing what was there."""

    def get(self, key: str, timeout: float | None = None) -> Any:
        """The value of a key, as soon as it exists.

        Raises:
            StoreTimeout: it does not.
            PeerLostError: the store is gone with rank 0.
        """

    def wait_all(self, keys: Sequence[str], timeout: float | None = None) -> list[Any]:
        """The values of several keys, as soon as all exist."""

    def peek(self, key: str, default: Any = None) -> Any:
        """The value of a key now, or `default`."""

    def add(self, key: str, n: int = 1) -> int:
        """Adds to an integer (0 where the key is new) and returns the sum, atomically."""

    def delete(self, prefix: str) -> int:
        """Removes all keys that start with `prefix` and returns how many there were."""

    def gather(
        self,
        key: str,
        rank: int,
        size: int,
        value: Any,
        timeout: float | None = None,
        members: Sequence[int] | None = None,
    ) -> list[Any]:
        """An all-gather: every one of `size` places contributes `value`, all get the list. Leaves no key behind.

        Args:
            key: names this gather; it may be used again once it is complete.
            rank: this caller's place, 0 … size-1.
            size: number of places.
            value: its contribution.
            timeout: seconds.
            members: world ranks by place (may be omitted where size is the world's). With them a member that is dead
                or has left fails the gather at once.

        Raises:
            StoreTimeout: places are missing (`missing` names their ranks).
            PeerLostError: a member is gone.
        """

    def barrier(
        self, key: str, rank: int, size: int, timeout: float | None = None, members: Sequence[int] | None = None
    ) -> None:
        """Returns once all have called it: a gather of nothing."""

    def close(self) -> None:
        """Closes this client's connection."""


class TcpStore:
    """A client of the server in rank 0 over an authenticated connection."""

    def __init__(self, sock: socket.socket, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._sock = close_in_child(sock)
        self._sock.setblocking(False)
        self._pid = os.getpid()
        self._reader = FrameReader()
        self._send_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._next = 0
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._gone = False

    def set(self, key: str, value: Any) -> None:
        """See `Store.set`."""
        self._call({"op": "set", "key": key, "value": value}, None, f"set {key!r}")

    def get(self, key: str, timeout: float | None = None) -> Any:
        """See `Store.get`."""
        return self.wait_all([key], timeout)[0]

    def wait_all(self, keys: Sequence[str], timeout: float | None = None) -> list[Any]:
        """See `Store.wait_all`."""
        what = f"waiting for {', '.join(map(repr, keys[:4]))}{' …' if len(keys) > 4 else ''}"
        return list(self._call({"op": "wait", "keys": list(keys)}, timeout, what)["value"])

    def peek(self, key: str, default: Any = None) -> Any:
        """See `Store.peek`."""
        answer = self._call({"op": "peek", "key": key}, None, f"peek {key!r}")
        return answer["value"] if answer["found"] else default

    def add(self, key: str, n: int = 1) -> int:
        """See `Store.add`."""
        return int(self._call({"op": "add", "key": key, "n": n}, None, f"add to {key!r}")["value"])

    def delete(self, prefix: str) -> int:
        """See `Store.delete`."""
        return int(self._call({"op": "delete", "prefix": prefix}, None, f"delete {prefix!r}")["value"])

    def gather(
        self,
        key: str,
        rank: int,
        size: int,
        value: Any,
        timeout: float | None = None,
        members: Sequence[int] | None = None,
    ) -> list[Any]:
        """See `Store.gather`."""
        if members is None and size == self.size:
            members = range(size)
        message = {"op": "gather", "key": key, "place": rank, "size": size, "value": value}
        message["members"] = None if members is None else list(members)
        return list(self._call(message, timeout, f"gather {key!r} of {size} ranks")["value"])

    def barrier(
        self, key: str, rank: int, size: int, timeout: float | None = None, members: Sequence[int] | None = None
    ) -> None:
        """See `Store.barrier`."""
        self.gather(key, rank, size, None, timeout, members)

    def close(self) -> None:
        """See `Store.close`."""
        self._gone = True
        self._sock.close()

    def _call(self, message: dict[str, Any], timeout: float | None, what: str) -> dict[str, Any]:
        seconds = self.timeout_s if timeout is None else timeout
        deadline = time.monotonic() + seconds
        number = self._request(message, deadline, what)
        try:
            answer = self._answer(number, deadline, what)
            if answer is None:
                missing = self._cancel(number, what)
                # The answer may have overtaken the cancellation.
                answer = self._answers.get(number)
                if answer is None:
                    raise _timed_out(what, seconds, missing, message["op"] == "gather")
        finally:
            self._answers.pop(number, None)
        if "error" in answer:
            raise BootstrapError(f"store: {what}: {answer['error']}")
        if "gone" in answer:
            how = "died or lost its connection" if answer["how"] == "lost" else "left"
            raise PeerLostError(f"store: {what} cannot complete: rank {answer['gone']} {how}", int(answer["gone"]))
        if answer.get("closed"):
            missing = answer["missing"]
            named = f"; {_missing(missing, bool(answer.get('gather')))}" if missing else ""
            raise PeerLostError(f"store: {what} ended because rank 0 closed the store{named}", 0)
        return answer

    def _request(self, message: dict[str, Any], deadline: float, what: str) -> int:
        if os.getpid() != self._pid:
            raise UsageError(f"the store of rank {self.rank} belongs to process {self._pid}, not to its forked child")
        with self._send_lock:
            self._next += 1
            number = self._next
            try:
                frame = encode({"id": number, **message})
                self._answers[number] = None
                send_all(self._sock, frame, deadline)
            except FrameError as error:
                raise UsageError(f"store: {what}: {error}") from None
            except TimeoutError:
                # Half a frame may be out: nothing can follow it.
                self.close()
                raise StoreTimeout(f"store: {what}: rank 0 does not read; is it stopped?") from None
            except (OSError, ValueError):
                self._lost(what)
        return number

    def _lost(self, what: str) -> None:
        self._gone = True
        raise PeerLostError(f"store: {what}: the store is gone, and so is rank 0 which held it", 0) from None

    def _answer(self, number: int, deadline: float, what: str) -> dict[str, Any] | None:
        while self._answers[number] is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            # Whoever holds the lock reads for every thread that waits.
            if not self._read_lock.acquire(timeout=min(left, _SLICE_S)):
                continue
            try:
                if self._answers[number] is None:
                    self._read(min(left, _SLICE_S), what)
            finally:
                self._read_lock.release()
        return self._answers[number]

    def _read(self, seconds: float, what: str) -> None:
        if self._gone:
            self._lost(what)
        try:
            if not wait_readable(self._sock, seconds):
                return
            data = self._sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ValueError):
            data = b""
        if not data:
            self._lost(what)
        for message in self._reader.feed(data):
            # Answers to requests that were given up are not kept.
            if message["id"] in self._answers:
                self._answers[message["id"]] = message

    def _cancel(self, request: int, what: str) -> list[Any]:
        deadline = time.monotonic() + _CANCEL_S
        with contextlib.suppress(PeerLostError, StoreTimeout):
            number = self._request({"op": "cancel", "request": request}, deadline, what)
            try:
                answer = self._answer(number, deadline, what)
                return list(answer["value"]) if answer else []
            finally:
                self._answers.pop(number, None)
        return []


class LocalStore:
    """The store of a world of one: a dictionary, no sockets, no threads."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: Any) -> None:
        """See `Store.set`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float | None = None) -> Any:
        """See `Store.get`."""
        return self.wait_all([key], timeout)[0]

    def wait_all(self, keys: Sequence[str], timeout: float | None = None) -> list[Any]:
        """See `Store.wait_all`."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout or 0):
                missing = [key for key in keys if key not in self._values]
                raise _timed_out(f"waiting for {missing}", timeout or 0, missing, False)
            return [self._values[key] for key in keys]

    def peek(self, key: str, default: Any = None) -> Any:
        """See `Store.peek`."""
        return self._values.get(key, default)

    def add(self, key: str, n: int = 1) -> int:
        """See `Store.add`."""
        with self._changed:
            self._values[key] = int(self._values.get(key, 0)) + n
            self._changed.notify_all()
            return int(self._values[key])

    def delete(self, prefix: str) -> int:
        """See `Store.delete`."""
        with self._changed:
            keys = [key for key in self._values if key.startswith(prefix)]
            for key in keys:
                del self._values[key]
            return len(keys)

    def gather(
        self,
        key: str,
        rank: int,
        size: int,
        value: Any,
        timeout: float | None = None,
        members: Sequence[int] | None = None,
    ) -> list[Any]:
        """See `Store.gather`."""
        if (rank, size) != (0, 1):
            raise UsageError(f"gather {key!r} as place {rank} of {size} in a world of one rank")
        return [value]

    def barrier(
        self, key: str, rank: int, size: int, timeout: float | None = None, members: Sequence[int] | None = None
    ) -> None:
        """See `Store.barrier`."""
        self.gather(key, rank, size, None)

    def close(self) -> None:
        """See `Store.close`."""


def send_all(sock: socket.socket, data: bytes, deadline: float) -> None:
    """Sends everything through a non-blocking socket.

    Raises:
        TimeoutError: the peer does not read.
        OSError: the connection is gone.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except (BlockingIOError, InterruptedError):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the peer does not read") from None
            _poll(sock, select.POLLOUT, min(left, 1.0))


def wait_readable(sock: socket.socket, seconds: float) -> bool:
    """Whether there is something to read (or an end of file) within the time."""
    return _poll(sock, select.POLLIN, seconds)


def _poll(sock: socket.socket, events: int, seconds: float) -> bool:
    # poll, not select: descriptors may be above 1023.
    poller = select.poll()
    poller.register(sock, events)
    return bool(poller.poll(max(0.0, seconds) * 1000))


def _missing(missing: Sequence[Any], ranks: bool) -> str:
    shown = ", ".join(str(item) if ranks else repr(item) for item in missing[:16])
    return f"missing {'rank' if ranks else 'key'}{'s' if len(missing) > 1 else ''}: {shown}" + (
        f" and {len(missing) - 16} more" if len(missing) > 16 else ""
    )


def _timed_out(what: str, seconds: float, missing: Sequence[Any], ranks: bool) -> StoreTimeout:
    detail = _missing(missing, ranks) if missing else "rank 0 did not answer; is it stopped?"
    return StoreTimeout(f"store: {what} took longer than {seconds:g} s: {detail}", missing)
