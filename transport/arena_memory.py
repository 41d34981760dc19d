"""Owns how much memory this process may still take: the host's available memory and the limits of its cgroups."""

from __future__ import annotations

import functools
import os
from typing import Final, NamedTuple

PROC: Final = "/proc"
CGROUPS: Final = "/sys/fs/cgroup"
_UNLIMITED: Final = 1 << 60  # v1 says "no limit" as the largest multiple of a page


class _Group(NamedTuple):
    """The files of one cgroup on the way from ours to the root."""

    limit: str
    used: str
    stat: str
    cache: tuple[str, ...]


def total_nbytes() -> int:
    """The host's memory in bytes, 0 where /proc does not say."""
    return _fields(f"{PROC}/meminfo", ("MemTotal:",)) * 1024


def available_nbytes() -> tuple[int, str]:
    """How many more bytes can be taken without swapping or meeting the out-of-memory killer.

    A cgroup's page cache counts as available: the kernel drops it before it kills anybody.

    Returns:
        The bytes, and what sets that figure, in words for an error message.
    """
    host = _fields(f"{PROC}/meminfo", ("MemAvailable:",)) * 1024 or _UNLIMITED
    found = [(host, "memory available on this host (MemAvailable)")]
    for group in _groups(PROC, CGROUPS, _text(f"{PROC}/self/cgroup")):
        limit = _number(group.limit)
        if limit is not None and limit < _UNLIMITED:
            used = (_number(group.used) or 0) - _fields(group.stat, group.cache)
            found.append((max(0, limit - max(0, used)), f"room below the cgroup limit {group.limit} = {limit}"))
    return min(found)


@functools.lru_cache(4)
def _groups(proc: str, cgroups: str, membership: str) -> tuple[_Group, ...]:
    """Every cgroup that may limit us; `membership` is the text of /proc/self/cgroup, so that a move counts."""
    found = []
    for line in membership.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            for root in (cgroups, f"{cgroups}/unified"):
                for folder in _ancestors(root, path):
                    cache = ("inactive_file", "active_file")
                    limit, used = f"{folder}/memory.max", f"{folder}/memory.current"
                    found.append(_Group(limit, used, f"{folder}/memory.stat", cache))
        elif "memory" in controllers.split(","):
            for folder in _ancestors(f"{cgroups}/memory", path):
                cache = ("total_inactive_file", "total_active_file")
                limit, used = f"{folder}/memory.limit_in_bytes", f"{folder}/memory.usage_in_bytes"
                found.append(_Group(limit, used, f"{folder}/memory.stat", cache))
    return tuple(group for group in found if os.path.exists(group.limit))


def _ancestors(root: str, path: str) -> list[str]:
    # In a container the path may be the host's while the mount shows only our own part: the root then is our group.
    parts = [part for part in path.split("/") if part and part != ".."]
    return ["/".join([root, *parts[:depth]]) for depth in range(len(parts), -1, -1)]


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _fields(path: str, names: tuple[str, ...]) -> int:
    """The sum of some lines of a file of names and numbers."""
    total = 0
    for line in _text(path).splitlines():
        words = line.split(None, 2)
        if len(words) > 1 and words[0] in names and words[1].isdigit():
            total += int(words[1])
    return total
