"""Owns what a card tells unasked: completion queues that ran over, ports that went down, a device that failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gfkernels.transport.verbs.device import Device

_CQ_ERR, _DEVICE_FATAL, _PORT_ERR = 0, 8, 10

# enum ibv_event_type.
_TEXTS: Final[dict[int, str]] = {
    _CQ_ERR: "a completion queue ran over, and completions are lost",
    1: "a queue pair failed",
    2: "a queue pair was sent an invalid request",
    3: "a queue pair was denied access to memory",
    4: "a message came before its connection was established",
    5: "a send queue is drained",
    6: "a connection moved to its other path",
    7: "a connection failed to move to its other path",
    _DEVICE_FATAL: "the card failed and must be reset",
    9: "a port is active",
    _PORT_ERR: "a port is down",
    11: "a port's LID changed",
    12: "a port's partition table changed",
    13: "the subnet has another manager",
    14: "a shared receive queue failed",
    15: "a shared receive queue runs low",
    16: "a queue pair took its last receive",
    17: "the subnet manager wants clients to register again",
    18: "a port's GID table changed",
    19: "a work queue failed",
}
_FATAL: Final = frozenset({_CQ_ERR, 1, 2, 3, _DEVICE_FATAL, 14, 19})


@dataclass(frozen=True)
class Event:
    """An asynchronous event.

    Attributes:
        kind: enum ibv_event_type.
        text: what happened, with the device's name.
        is_fatal: what is under way on this device will not end well; a port that is down may come back.
    """

    kind: int
    text: str
    is_fatal: bool


def describe(device: str, kind: int) -> Event:
    """An event in words.

    Args:
        device: its name.
        kind: enum ibv_event_type.
    """
    return Event(kind, f"RDMA device {device}: {_TEXTS.get(kind, f'event {kind}')}", kind in _FATAL)


def events(device: Device) -> Iterator[Event]:
    """What has come since the last time; never waits. Poll `device.async_fd` (POLLIN) to know when to look."""
    device.check_process()
    if device.async_fd < 0 or device.context is None:
        return  # reading could block, with the GIL held
    while True:
        try:
            event = device.context.get_async_event()
        except device.verbs.Error:
            return  # the descriptor does not block: this says that there is nothing more
        kind = int(event.event_type)
        # A queue pair or queue cannot be destroyed before its events are acknowledged.
        event.ack()
        yield describe(device.name, kind)
