"""Owns the tests of grouping ranks by host and of counting the cores that they may use."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from gfkernels.bootstrap.hosts import HostIdentity, cores_available, cpu_quota, group_hosts, this_host
from gfkernels.bootstrap.network import interface_addresses
from gfkernels.errors import ConfigError


def _on(boot: str, cores: tuple[int, ...] = (0, 1), quota: float | None = None, group: str = "g") -> HostIdentity:
    return dataclasses.replace(this_host(), boot_id=boot, cores=cores, quota=quota, quota_group=group)


def test_uneven_hosts() -> None:
    identities = [_on("a"), _on("b"), _on("a"), _on("c"), _on("a")]
    hosts = group_hosts(2, identities)
    assert hosts.groups == ((0, 2, 4), (1,), (3,))
    assert (hosts.host, hosts.local_ranks, hosts.local_rank, hosts.local_size) == (0, (0, 2, 4), 1, 3)
    assert group_hosts(3, identities).local_size == 1
    assert hosts.oversubscribed and not group_hosts(1, identities).oversubscribed


def test_cores_are_the_union_capped_by_quotas() -> None:
    assert cores_available([_on("a", (0,)), _on("a", (0, 1)), _on("a", (5,))]) == 3
    assert cores_available([_on("a", (0, 1, 2, 3), 1.5), _on("a", (0, 1, 2, 3), 1.5)]) == 1.5
    assert cores_available([_on("a", (0, 1, 2, 3), 1.5, "g"), _on("a", (0, 1, 2, 3), 1.0, "h")]) == 2.5
    assert cores_available([_on("a", (0, 1), 1.5, "g"), _on("a", (0, 1), None, "h")]) == 2


def test_identity_travels_as_json() -> None:
    mine = this_host()
    assert HostIdentity.parse(json.loads(json.dumps(mine.message()))) == mine
    assert mine.pid == os.getpid() and set(mine.cores) == os.sched_getaffinity(0)


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        ({"proc/self/cgroup": "0::/../host/path\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n1:memory:/x\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(_tree(tmp_path, files))[0] == quota


def test_interfaces() -> None:
    assert all(name != "lo" and not address.startswith("127.") for name, address in interface_addresses())
    assert ("lo", "127.0.0.1") in interface_addresses("lo")
    with pytest.raises(ConfigError, match=r"nosuch0.*this host has"):
        interface_addresses("nosuch0")
