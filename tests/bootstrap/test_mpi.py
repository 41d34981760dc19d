"""Owns the tests of meeting under MPI: over an mpi4py communicator, and from a launcher's variables alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gfkernels.bootstrap import connect, discover, mpi
from gfkernels.bootstrap.world import World
from gfkernels.config import Config

Start = Callable[..., Any]


class FakeComm:
    """What `mpi` uses of an mpi4py communicator, over files."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self.folder, self.calls = rank, size, folder, 0

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Allgather(self, mine: bytes, every: bytearray) -> None:
        self.calls += 1
        part = self.folder / f"{self.calls}.{self.rank}.part"
        part.write_bytes(mine)
        part.rename(part.with_suffix(""))
        every[:] = b"".join(self._read(rank) for rank in range(self.size))

    def Bcast(self, buffer: bytearray, root: int) -> None:
        self.calls += 1
        if self.rank == root:
            part = self.folder / f"{self.calls}.{root}.part"
            part.write_bytes(buffer)
            part.rename(part.with_suffix(""))
        data = self._read(root)
        assert len(data) == len(buffer)
        buffer[:] = data

    def _read(self, rank: int) -> bytes:
        path = self.folder / f"{self.calls}.{rank}"
        while not path.exists():
            time.sleep(0.005)
        return path.read_bytes()


def test_an_mpi_communicator_carries_address_and_secret(start: Start, tmp_path: Path) -> None:
    def rank(r: int) -> Any:
        comm = FakeComm(r, 3, tmp_path)
        session = connect(discover({}, comm=comm), Config(connect_timeout_s=10))
        session.store.barrier("x", r, 3)
        session.close()
        return session.secret, session.world.source, session.world.local_rank

    results = [each.result() for each in [start(rank, r) for r in range(3)]]
    assert len({result[0] for result in results}) == 1
    assert [result[1:] for result in results] == [("mpi4py", 0), ("mpi4py", 1), ("mpi4py", 2)]


def test_an_error_of_rank_0_reaches_all_by_mpi(start: Start, tmp_path: Path) -> None:
    def rank(r: int) -> None:
        comm = FakeComm(r, 2, tmp_path)
        connect(discover({}, comm=comm), Config(bind_address="192.0.2.1", connect_timeout_s=10))

    for each in [start(rank, r) for r in range(2)]:
        assert "192.0.2.1" in str(each.error())


def test_mpi_variables_without_mpi4py(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks derive one address from their common launcher; two such jobs of one user do not mix."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    def rank(r: int, job: str) -> Any:
        environ = {"OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": job}
        environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": str(r), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        session = connect(discover(environ), Config(connect_timeout_s=10))
        found = session.store.gather("x", r, 2, job)
        session.close()
        return found

    ranks = [start(rank, r, job) for job in ("prte-1", "prte-2") for r in (0, 1)]
    assert [each.result() for each in ranks] == [["prte-1"] * 2] * 2 + [["prte-2"] * 2] * 2


class FakeMPI(SimpleNamespace):
    """What `mpi` uses of `mpi4py.MPI`; only once it is initialised may COMM_WORLD be looked at."""

    THREAD_SINGLE, THREAD_MULTIPLE = 0, 3

    def __init__(self, vendor: str) -> None:
        super().__init__(vendor=vendor, level=None, finalized=False)

    def get_vendor(self) -> tuple[str, tuple[int, ...]]:
        return self.vendor, (5, 0, 2)

    def Is_initialized(self) -> bool:
        return self.level is not None

    def Is_finalized(self) -> bool:
        return bool(self.finalized)

    def Init_thread(self, level: int) -> None:
        self.level = level

    def Finalize(self) -> None:
        self.finalized = True

    @property
    def COMM_WORLD(self) -> Any:
        assert self.Is_initialized()
        return SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 2)


@pytest.mark.parametrize(
    ("vendor", "launcher", "initialize", "threads", "level"),
    [
        ("Open MPI", "Open MPI", True, True, 3),
        ("Open MPI", "Open MPI", True, False, 0),
        ("Open MPI", "Open MPI", False, True, None),
        ("MPICH", "Open MPI", True, True, None),
        ("Open MPI", "MPICH", True, True, None),
        ("Intel MPI", "MPICH", True, True, 3),
        ("MPICH", "MPICH", True, True, 3),
    ],
)
def test_mpi4py_is_initialised_where_it_belongs_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch, vendor: str, launcher: str, initialize: bool, threads: bool, level: int | None
) -> None:
    """MPICH ends a process that Open MPI started, and whoever sets `mpi4py.rc` initialises for himself."""
    module, MPI, at_exit = ModuleType("mpi4py"), FakeMPI(vendor), []
    module.__spec__ = ModuleSpec("mpi4py", None)
    rc = SimpleNamespace(initialize=initialize, threads=threads, thread_level="multiple")
    vars(module).update(rc=rc, MPI=MPI)
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    monkeypatch.setattr("atexit.register", lambda *call: at_exit.append(call))
    comm = mpi.communicator_of(World(1, 2, 1, 2, None, launcher))
    assert MPI.level == level and (comm is None) == (level is None)
    assert rc.initialize is initialize
    for function, *arguments in at_exit:
        function(*arguments)
    assert MPI.finalized == (level is not None)
