"""Owns how much memory this process may still take: the host's available memory and the limits of its cgroups."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # v1 says "no limit" as the largest multiple of a page


def total_nbytes() -> int:
    """The host's memory in bytes, 0 where /proc does not say."""
    return _meminfo().get("MemTotal", 0)


def available_nbytes() -> tuple[int, str]:
    """How many more bytes can be taken without swapping or meeting the out-of-memory killer.

    A cgroup's page cache counts as available: the kernel drops it before it kills anybody.

    Returns:
        The bytes, and what sets that figure, in words for an error message.
    """
    meminfo = _meminfo()
    found = [(meminfo.get("MemAvailable", _UNLIMITED), "memory available on this host (MemAvailable)")]
    found += _cgroup_v2() + _cgroup_v1()
    return min(found)


def _meminfo() -> dict[str, int]:
    values: dict[str, int] = {}
    for line in _text(_PROC / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * 1024
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _stat(path: Path, names: tuple[str, ...]) -> int:
    total = 0
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name in names and value.strip().isdigit():
            total += int(value)
    return total


def _membership(wanted: str) -> str | None:
    """The path of this process in the hierarchy of a controller ("" is the unified one)."""
    for line in _text(_PROC / "self" / "cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if wanted in controllers.split(","):
            return path
    return None


def _ancestors(root: Path, path: str) -> list[Path]:
    # In a container the path may be the host's while the mount shows only our own part: the root then is our group.
    parts = [part for part in path.split("/") if part and part != ".."]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _cgroup_v2() -> list[tuple[int, str]]:
    path = _membership("")
    if path is None:
        return []
    found = []
    for root in (_CGROUPS, _CGROUPS / "unified"):
        for group in _ancestors(root, path):
            limit, used = _number(group / "memory.max"), _number(group / "memory.current")
            if limit is not None and used is not None:
                cache = _stat(group / "memory.stat", ("inactive_file", "active_file"))
                room = max(0, limit - max(0, used - cache))
                found.append((room, f"room below the cgroup limit {group}/memory.max = {limit}"))
    return found


def _cgroup_v1() -> list[tuple[int, str]]:
    path = _membership("memory")
    if path is None:
        return []
    found = []
    for group in _ancestors(_CGROUPS / "memory", path):
        limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _UNLIMITED:
            cache = _stat(group / "memory.stat", ("total_inactive_file", "total_active_file"))
            room = max(0, limit - max(0, used - cache))
            found.append((room, f"room below the cgroup limit {group}/memory.limit_in_bytes = {limit}"))
    return found
