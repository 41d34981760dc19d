"""Owns the tests of world discovery: arguments and every launcher's variables, right, half-set and contradictory."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gfkernels.bootstrap import discover
from gfkernels.bootstrap.launchers import launcher_id
from gfkernels.bootstrap.slurm import expand_counts, expand_nodes
from gfkernels.bootstrap.world import is_loopback, parse_store
from gfkernels.errors import ConfigError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
}


def test_nothing_set_is_a_single_process() -> None:
    world = discover({})
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert world.store_address is None and world.source == "single process"


def test_torchrun() -> None:
    world = discover({**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    assert not world.single_host
    assert world.store_address is not None
    assert world.store_address.host == "node1"
    assert world.store_address.ports == list(range(29501, 29517)), "MASTER_PORT itself is torch's"


def test_torchrun_on_one_host_uses_loopback() -> None:
    world = discover({**TORCHRUN, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"})
    assert world.single_host and world.store_address is not None and world.store_address.host == "localhost"


def test_ports_end_where_ports_end() -> None:
    address = discover({**TORCHRUN, "MASTER_PORT": "65530"}).store_address
    assert address is not None and address.ports == [65531, 65532, 65533, 65534, 65535]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": None}, ["RANK=3", "WORLD_SIZE"]),
        ({"RANK": None}, ["WORLD_SIZE=4", "RANK"]),
        ({"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
        ({"RANK": "-1"}, ["RANK='-1'"]),
        ({"RANK": "three"}, ["RANK='three'"]),
        ({"WORLD_SIZE": "0", "RANK": "0"}, ["WORLD_SIZE=0"]),
        ({"MASTER_PORT": None}, ["MASTER_PORT"]),
        ({"MASTER_ADDR": None}, ["MASTER_ADDR"]),
        ({"MASTER_PORT": "99999"}, ["MASTER_PORT=99999"]),
        ({"LOCAL_WORLD_SIZE": "5"}, ["5 ranks on this host", "4 ranks in all"]),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, ["local rank 2 of 2"]),
    ],
)
def test_bad_variables_are_named(changes: dict[str, str | None], words: list[str]) -> None:
    environ = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        discover(environ)
    for word in words:
        assert word in str(caught.value)


def test_arguments_win_over_variables() -> None:
    world = discover(TORCHRUN, rank=0, size=2, store="localhost:4000")
    assert (world.rank, world.size, world.source) == (0, 2, "arguments")
    assert world.store_address is not None and world.store_address.ports == [4000]


def test_store_alone_keeps_the_launchers_rank() -> None:
    world = discover(TORCHRUN, store="10.0.0.1:4000")
    assert world.rank == 3 and not world.single_host
    assert world.store_address is not None and world.store_address.host == "10.0.0.1"


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 0},
        {"size": 2},
        {"rank": 2, "size": 2, "store": "localhost:1"},
        {"rank": -1, "size": 2, "store": "localhost:1"},
        {"rank": 0, "size": 0, "store": "localhost:1"},
        {"rank": 0.5, "size": 2, "store": "localhost:1"},
        {"rank": True, "size": 2, "store": "localhost:1"},
        {"rank": 0, "size": 2},
        {"comm": object()},
        {"store": "nowhere"},
    ],
)
def test_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        discover({}, **options)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("a:1", "a", 1), ("[::1]:29500", "::1", 29500), ("127.0.0.1:65535", "127.0.0.1", 65535)],
)
def test_store_addresses(text: str, host: str, port: int) -> None:
    address = parse_store(text)
    assert (address.host, address.port, address.exact) == (host, port, True)
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:b", "::1:29500", "a:-1"])
def test_bad_store_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="store="):
        parse_store(text)


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "PMIX_RANK": "1",
            },
            "Open MPI",
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, "MPICH"),
        (
            {
                "MV2_COMM_WORLD_RANK": "1",
                "MV2_COMM_WORLD_SIZE": "2",
                "MV2_COMM_WORLD_LOCAL_RANK": "1",
                "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "MVAPICH",
        ),
    ],
)
def test_mpi_launchers_on_one_host(environ: dict[str, str], source: str) -> None:
    world = discover(environ)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (1, 2, 1, 2)
    assert world.source == source and world.single_host
    again = discover(environ).store_address
    assert world.store_address == again, "all ranks must derive the same port"
    assert again is not None and 20_000 <= again.port < 30_000


def test_mpi_on_several_hosts_without_address_says_what_to_do() -> None:
    environ = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(ConfigError, match=r"mpi4py.*MASTER_ADDR"):
        discover(environ)
    world = discover({**environ, "MASTER_ADDR": "node1", "MASTER_PORT": "3000"})
    assert world.store_address is not None and world.store_address.host == "node1" and not world.single_host


def test_pmix_without_a_size_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"PMIX_RANK=2.*mpi4py"):
        discover({"PMIX_RANK": "2"})


def test_torchrun_inside_mpi_is_torchrun() -> None:
    assert discover({**TORCHRUN, "PMI_RANK": "0", "PMI_SIZE": "2"}).source == "torchrun"


def test_slurm_uneven() -> None:
    world = discover(SLURM)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 5, 0, 2)
    assert world.store_address is not None and world.store_address.host == "gpu08"
    assert world.job_id == "slurm-77.0" and not world.single_host
    assert discover({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "5"}).source == "Slurm"
    assert discover({**SLURM, "PMIX_RANK": "3"}).source == "Slurm"


def test_slurm_outside_srun_is_a_single_process() -> None:
    assert discover({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).size == 1
    assert discover({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}).size == 1


def test_slurm_contradiction() -> None:
    with pytest.raises(ConfigError, match="SLURM_PROCID=5"):
        discover({**SLURM, "SLURM_PROCID": "5"})


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[01-03,7]-ib,login", ["gpu01-ib", "gpu02-ib", "gpu03-ib", "gpu7-ib", "login"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("a,b[2],c-[098-101].x", ["a", "b2", "c-098.x", "c-099.x", "c-100.x", "c-101.x"]),
    ],
)
def test_node_lists(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["a[1-2", "a1-2]", "a[[1]]", "a[x]", "a[3-1]", "a,,b", "a[]", ""])
def test_bad_node_lists(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_NODELIST"):
        expand_nodes(text)


def test_task_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ConfigError, match="TASKS_PER_NODE"):
        expand_counts("2(x)")


def test_loopback_names() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.8.8.8", "::1", "ip6-localhost"]))
    assert not any(map(is_loopback, ["10.0.0.1", "node1", "fe80::1"]))


def test_launcher_id_names_a_process() -> None:
    assert launcher_id() == launcher_id()
    assert str(os.getppid()) in launcher_id() or "-" in launcher_id()
