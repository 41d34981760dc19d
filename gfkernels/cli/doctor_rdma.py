"""Owns the doctor's look at RDMA: cards and their ports, pyverbs, pinned memory, GPU memory, a port against itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from gfkernels.doctor import FAIL, NOTE, OK, WARN, Finding
from gfkernels.errors import GfkernelsError, UnavailableError

if TYPE_CHECKING:
    from gfkernels.transport.verbs.sysfs import Card, Port

_TOPIC: Final = "RDMA"


def rdma() -> list[Finding]:
    """Cards, ports, addresses, and what else this process needs to use them."""
    from gfkernels.transport.verbs import sysfs

    if sys.platform != "linux":
        return []
    cards = sysfs.scan()
    if not cards:
        text = "no devices in /sys/class/infiniband: TCP is used between hosts"
        return [Finding(_TOPIC, "devices", NOTE, text)]
    return [*(_port(card, port) for card in cards for port in card.ports), _pyverbs(), _memlock()]


def rdma_self_test() -> list[Finding]:
    """Every card that can be opened sends messages from a port to itself."""
    from gfkernels.transport.verbs import sysfs

    cards = [card for card in sysfs.scan() if card.why_not() is None] if sys.platform == "linux" else []
    return [_open(card) for card in cards] if cards and _pyverbs().state == OK else []


def _port(card: Card, port: Port) -> Finding:
    from gfkernels.transport.verbs import devices
    from gfkernels.transport.verbs.settings import Settings

    trouble = card.why_not()
    if trouble is not None:
        return Finding(_TOPIC, port.name, WARN, f"{port}: {trouble[0]}", trouble[1])
    if not port.is_active:
        return Finding(_TOPIC, port.name, NOTE, str(port), "Not used while it is not ACTIVE")
    try:
        (choice,) = devices.choose([card], Settings(device=port.name))
    except UnavailableError as error:
        return Finding(_TOPIC, port.name, WARN, error.reason, error.remedy)
    chosen = f"; GID {choice.gid.index} ({choice.gid.address}) is used" if choice.gid else ""
    return Finding(_TOPIC, port.name, OK, f"{port}{chosen}")


def _pyverbs() -> Finding:
    from gfkernels.transport.verbs import compat

    try:
        return Finding(_TOPIC, "pyverbs", OK, compat.version())
    except UnavailableError as error:
        return Finding(_TOPIC, "pyverbs", WARN, error.reason, error.remedy)


def _memlock() -> Finding:
    from gfkernels.transport.verbs import memlock

    now = memlock.memlock()
    if now.exempt or now.limit_nbytes is None:
        text = "unlimited" if now.limit_nbytes is None else "does not apply to this process (CAP_IPC_LOCK)"
        return Finding(_TOPIC, "memlock limit", OK, text)
    text = f"{now.limit_nbytes >> 10} KiB, {now.pinned_nbytes >> 10} KiB in use"
    return Finding(_TOPIC, "memlock limit", WARN, text, memlock.REMEDY)


def _open(card: Card) -> Finding:
    from gfkernels.transport.verbs import gpu_memory
    from gfkernels.transport.verbs.device import open_device
    from gfkernels.transport.verbs.loopback import loopback_check

    if not any(port.is_active for port in card.ports):
        return Finding(_TOPIC, f"{card.name} self-test", NOTE, "not run: no port is ACTIVE")
    try:
        device = open_device(card.name)
        try:
            reaches, how = gpu_memory.probe_gpu_memory(device)
        finally:
            device.close()
        went = loopback_check(card.name)
    except GfkernelsError as error:
        return Finding(_TOPIC, f"{card.name} self-test", FAIL, str(error))
    gpu = f"GPU memory: {how}" if reaches else f"no GPU memory ({how})"
    if not went.ok:
        return Finding(_TOPIC, f"{card.name} self-test", WARN, f"{went.reason}; {gpu}")
    path = "machine code" if went.compiled else "pyverbs, which is slow: the card's functions were not found"
    text = f"{went.port} reaches itself, {went.one_way_us:.1f} µs one way, through {path}; {gpu}"
    return Finding(_TOPIC, f"{card.name} self-test", OK if went.compiled else WARN, text)
