"""Owns which ranks share a host, and how many cores these may use together."""

from __future__ import annotations

import math
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class HostIdentity:
    """What a rank publishes about where it runs.

    Attributes:
        boot_id: the kernel's boot id: equal exactly on one running kernel, whatever containers call themselves.
        hostname: for people only.
        pid: in the rank's own PID namespace.
        pid_ns, net_ns, mnt_ns: the namespaces' identities; ranks with another `pid_ns` cannot name each other by pid.
        uid: the user, which cross-memory attach needs to be equal.
        cores: the cores this process may run on.
        quota: cores that its control group grants (may be fractional), None without a limit.
        quota_group: identifies that control group: ranks in one share the quota.
    """

    boot_id: str
    hostname: str
    pid: int
    pid_ns: str
    net_ns: str
    mnt_ns: str
    uid: int
    cores: tuple[int, ...]
    quota: float | None
    quota_group: str

    def message(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "cores": list(self.cores)}

    @classmethod
    def parse(cls, message: dict[str, Any]) -> HostIdentity:
        """From JSON."""
        return cls(**{**message, "cores": tuple(message["cores"])})


@dataclass(frozen=True)
class Hosts:
    """Where all ranks run.

    Attributes:
        rank: this process's rank.
        identities: by rank.
        groups: the ranks of each host in ascending order, hosts in the order of their lowest rank.
    """

    rank: int
    identities: tuple[HostIdentity, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def host(self) -> int:
        """Index of this rank's host in `groups`."""
        return next(index for index, group in enumerate(self.groups) if self.rank in group)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks on this host, this one included: equal boot ids. A probe shows whether memory can be shared."""
        return self.groups[self.host]

    @property
    def local_rank(self) -> int:
        """Place of this rank among `local_ranks`."""
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return len(self.local_ranks)

    @property
    def cores_available(self) -> float:
        """Cores that this host's ranks may use together: the union of their affinities, capped by their quotas."""
        return cores_available([self.identities[rank] for rank in self.local_ranks])

    @property
    def oversubscribed(self) -> bool:
        """Whether some rank has to wait for a core: spinning then takes time from the rank that is waited for."""
        return self.cores_available < self.local_size


def group_hosts(rank: int, identities: Sequence[HostIdentity]) -> Hosts:
    """Groups ranks by boot id."""
    groups: dict[str, list[int]] = {}
    for other, identity in enumerate(identities):
        groups.setdefault(identity.boot_id, []).append(other)
    return Hosts(rank, tuple(identities), tuple(tuple(group) for group in groups.values()))


def cores_available(identities: Sequence[HostIdentity]) -> float:
    """The union of affinities, capped by the sum of the distinct control groups' quotas."""
    union = len({core for identity in identities for core in identity.cores})
    quotas = {identity.quota_group: identity.quota for identity in identities}
    limits = [math.inf if quota is None else quota for quota in quotas.values()]
    return min(float(union), sum(limits))


def this_host() -> HostIdentity:
    """What this process publishes."""
    quota, group = cpu_quota()
    return HostIdentity(
        boot_id=boot_id(),
        hostname=socket.gethostname(),
        pid=os.getpid(),
        pid_ns=_namespace("pid"),
        net_ns=_namespace("net"),
        mnt_ns=_namespace("mnt"),
        uid=os.getuid() if hasattr(os, "getuid") else -1,
        cores=tuple(sorted(_cores())),
        quota=quota,
        quota_group=group,
    )


def boot_id() -> str:
    """The running kernel's identity; elsewhere than on Linux the host name with the network card's number."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():x}"


def cpu_quota(root: Path = Path("/")) -> tuple[float | None, str]:
    """The control group's limit in cores and the group's identity; (None, …) without one.

    Args:
        root: where `proc` and `sys` lie (tests put their own there).
    """
    namespace = _namespace("cgroup", root)
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None, namespace
    tightest: float | None = None
    group = namespace
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, read = root / "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "sys/fs/cgroup" / controllers, _quota_v1
            if not base.is_dir():
                base = root / "sys/fs/cgroup/cpu"
        else:
            continue
        # Limits of the groups above count too; in a container the path may not exist below the mount.
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            quota = read(base.joinpath(*parts[:depth]))
            if quota is not None and (tightest is None or quota < tightest):
                tightest, group = quota, f"{namespace}:/{'/'.join(parts[:depth])}"
    return tightest, group


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None


def _namespace(kind: str, root: Path = Path("/")) -> str:
    try:
        return os.readlink(root / "proc/self/ns" / kind)
    except OSError:
        return ""


def _cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))
