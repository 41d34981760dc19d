"""Owns the tests that run every example as its first lines say, with the launchers that are there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gfkernels.cli.bench_peers import find_peers
from gfkernels.cli.self_run import environment

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SAYS = {
    "01_allreduce.py": "rank 1 of 2 has [3. 3. 3. 3. 3.]",
    "02_torch_beside_its_process_group.py": "equal results over 2 ranks",
    "03_mpi4py.py": "gfkernels and MPI agree on 100000 sums over 2 ranks",
    "04_data_parallel_training.py": "weights equal to the bit on 2 ranks",
    "05_persistent_and_overlap.py": "8 asynchronous calls",
    "06_float16_on_the_wire.py": "travelling as float16",
    "07_surviving_a_lost_rank.py": "1 of 2 ranks go on; the sum is 1",
}
QUICK = ("01_allreduce.py", "04_data_parallel_training.py")
UNDER_MPI = "03_mpi4py.py"
WITH_TORCH = "02_torch_beside_its_process_group.py"


def _run(words: list[str], folder: Path) -> str:
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in environment().items() if name not in variables}
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_none_is_forgotten() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_each_is_short_and_says_how_to_run_it(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    assert len(lines) < 60
    assert any(f"examples/{name}" in line for line in lines[:6])
    assert any(line.lstrip().startswith("assert ") for line in lines)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in SAYS if name != UNDER_MPI],
)
def test_with_our_launcher(name: str, tmp_path: Path) -> None:
    if name == WITH_TORCH and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed (gfkernels[torch])")
    words = [sys.executable, "-m", "gfkernels", "run", "-n", "2", "--timeout", "100", str(EXAMPLES / name)]
    assert SAYS[name] in _run(words, tmp_path)


@pytest.mark.slow
def test_three_ranks_of_which_two_go_on(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gfkernels", "run", "-n", "3", str(EXAMPLES / "07_surviving_a_lost_rank.py")]
    assert "2 of 3 ranks go on; the sum is 2" in _run(words, tmp_path)


@pytest.mark.slow
def test_with_torchrun(tmp_path: Path) -> None:
    beside = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    torchrun = beside or shutil.which("torchrun")
    if torchrun is None:
        pytest.skip("there is no torchrun: torch is not installed (gfkernels[torch])")
    words = [torchrun, "--standalone", "--nproc-per-node", "2", str(EXAMPLES / WITH_TORCH)]
    assert SAYS[WITH_TORCH] in _run(words, tmp_path)


@pytest.mark.mpi
def test_with_mpiexec(tmp_path: Path) -> None:
    found = find_peers()
    if not found.launcher:
        pytest.skip(f"no MPI here: {found.peers['mpi']}")
    words = [*found.launcher, "-n", "2", sys.executable, str(EXAMPLES / UNDER_MPI)]
    assert SAYS[UNDER_MPI] in _run(words, tmp_path)


def test_alone_where_no_launcher_is_used(tmp_path: Path) -> None:
    assert os.environ.get("RANK") is None
    words = [sys.executable, str(EXAMPLES / "01_allreduce.py")]
    assert "rank 0 of 1 has [1. 1. 1. 1. 1.]" in _run(words, tmp_path)
