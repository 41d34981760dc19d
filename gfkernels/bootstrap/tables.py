"""Owns what the store's server keeps: keys with their waiters, and gathers that vanish once everyone has the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Waiter:
    """A request that is answered once all its keys exist."""

    client: Any
    request: int
    keys: list[str]


@dataclass
class Gather:
    """Contributions of one all-gather, by place; `members` are world ranks by place, where the caller named them."""

    size: int
    members: list[int] | None
    values: dict[int, Any] = field(default_factory=dict)
    waiters: list[tuple[Any, int]] = field(default_factory=list)

    def missing(self) -> list[int]:
        """World ranks (places, where the members are unknown) that have not contributed."""
        places = [place for place in range(self.size) if place not in self.values]
        return [self.members[place] for place in places] if self.members else places


class Tables:
    """The store's state. `send(client, message)` answers; clients are opaque and compared by identity."""

    def __init__(self, send: Callable[[Any, Any], None]) -> None:
        self._send = send
        self._values: dict[str, Any] = {}
        self._waiters: list[Waiter] = []
        self._gathers: dict[str, Gather] = {}
        self._gone: dict[int, str] = {}

    def request(self, client: Any, message: dict[str, Any]) -> None:
        """Carries out one request, and answers it now or later."""
        number, op = int(message["id"]), message["op"]
        if op == "set":
            self._values[message["key"]] = message["value"]
            self._send(client, {"id": number})
            self._serve_waiters()
        elif op == "wait":
            self._waiters.append(Waiter(client, number, list(message["keys"])))
            self._serve_waiters()
        elif op == "peek":
            key = message["key"]
            self._send(client, {"id": number, "found": key in self._values, "value": self._values.get(key)})
        elif op == "add":
            value = self._values.get(message["key"], 0)
            if not isinstance(value, int):
                self._send(client, {"id": number, "error": f"key {message['key']!r} holds {value!r}, not an integer"})
                return
            self._values[message["key"]] = value + int(message["n"])
            self._send(client, {"id": number, "value": self._values[message["key"]]})
            self._serve_waiters()
        elif op == "delete":
            keys = [key for key in self._values if key.startswith(message["prefix"])]
            for key in keys:
                del self._values[key]
            self._send(client, {"id": number, "value": len(keys)})
        elif op == "gather":
            self._gather(client, number, message)
        elif op == "cancel":
            self._cancel(client, number, int(message["request"]))
        else:
            raise ValueError(f"unknown operation {op!r}")

    def _serve_waiters(self) -> None:
        waiting = []
        for waiter in self._waiters:
            if all(key in self._values for key in waiter.keys):
                values = [self._values[key] for key in waiter.keys]
                self._send(waiter.client, {"id": waiter.request, "value": values})
            else:
                waiting.append(waiter)
        self._waiters = waiting

    def _gather(self, client: Any, number: int, message: dict[str, Any]) -> None:
        key, place, size = message["key"], int(message["place"]), int(message["size"])
        gather = self._gathers.setdefault(key, Gather(size, message["members"]))
        if gather.size != size or not 0 <= place < size or place in gather.values:
            why = f"gather {key!r} of {gather.size} places was joined as place {place} of {size}"
            self._send(client, {"id": number, "error": f"{why}, which is taken or does not exist"})
            return
        gather.values[place] = message["value"]
        gather.waiters.append((client, number))
        if len(gather.values) == size:
            del self._gathers[key]
            values = [gather.values[place] for place in range(size)]
            for waiter, request in gather.waiters:
                self._send(waiter, {"id": request, "value": values})
        else:
            self._fail_gather(key, gather)

    def _fail_gather(self, key: str, gather: Gather) -> None:
        if gather.members is None:
            return
        for rank in gather.missing():
            if rank in self._gone:
                # Left in place, so that members who come later learn of it at once too.
                for client, request in gather.waiters:
                    self._send(client, {"id": request, "gone": rank, "how": self._gone[rank], "key": key})
                gather.waiters.clear()
                return

    def _cancel(self, client: Any, number: int, request: int) -> None:
        missing: list[Any] = []
        for waiter in [w for w in self._waiters if w.client is client and w.request == request]:
            missing = [key for key in waiter.keys if key not in self._values]
            self._waiters.remove(waiter)
        for gather in self._gathers.values():
            if (client, request) in gather.waiters:
                gather.waiters.remove((client, request))
                missing = gather.missing()
        self._send(client, {"id": number, "value": missing})

    def forget(self, client: Any) -> None:
        """Drops the waits of a client whose connection is gone."""
        self._waiters = [waiter for waiter in self._waiters if waiter.client is not client]
        for gather in self._gathers.values():
            gather.waiters = [pair for pair in gather.waiters if pair[0] is not client]

    def gone(self, rank: int, how: str) -> None:
        """A rank was lost or left: gathers that still need it fail now."""
        self._gone[rank] = how
        for key, gather in list(self._gathers.items()):
            if rank in gather.missing():
                self._fail_gather(key, gather)

    def close(self) -> None:
        """Answers every wait: the store ends."""
        for waiter in self._waiters:
            missing = [key for key in waiter.keys if key not in self._values]
            self._send(waiter.client, {"id": waiter.request, "closed": True, "missing": missing})
        for gather in self._gathers.values():
            for client, request in gather.waiters:
                self._send(client, {"id": request, "closed": True, "missing": gather.missing(), "gather": True})
        self._waiters.clear()
        self._gathers.clear()
