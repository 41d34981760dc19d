"""Owns the tests of what is shipped: wheel and sdist hold what they should, install elsewhere, and import lightly."""

from __future__ import annotations

import ast
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {"gfkernels.transport": ROOT / "transport", "gfkernels.bindings": ROOT / "bindings"}


def _run(argv: Sequence[object], cwd: Path, **variables: str) -> str:
    """Standard output of a program that sees neither this checkout nor a launcher's variables."""
    drop = ("GFKERNELS_", "PYTHONPATH", "RANK", "WORLD_SIZE", "MASTER_", "COVERAGE_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    done = subprocess.run(
        [str(item) for item in argv],
        cwd=cwd,
        env=env | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


def _modules() -> set[str]:
    """Paths inside site-packages of every module in the tree."""
    found = set()
    for path in (ROOT / "gfkernels").rglob("*.py"):
        found.add(path.relative_to(ROOT).as_posix())
    for name, folder in SOURCES.items():
        for path in folder.rglob("*.py"):
            found.add((Path(*name.split(".")) / path.relative_to(folder)).as_posix())
    return {name for name in found if "__pycache__" not in name}


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and an sdist, built from a copy so that nothing is written into the tree."""
    copy = tmp_path_factory.mktemp("source") / "gfkernels"

    def made_here(folder: str, names: list[str]) -> set[str]:
        return {
            name
            for name in names
            if name in ("build", "dist", "__pycache__")
            or name.endswith(".egg-info")
            or (name.startswith(".") and name not in (".ci", ".gitignore", ".pre-commit-config.yaml"))
        }

    shutil.copytree(ROOT, copy, symlinks=True, ignore=made_here)
    out = tmp_path_factory.mktemp("dist")
    # The sdist first and the wheel out of it: what a packager does.
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy], copy)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="session")
def elsewhere(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel installed into a fresh virtual environment, and a folder to work in that is not the checkout."""
    home = tmp_path_factory.mktemp("fresh")
    _run([sys.executable, "-m", "venv", home / "venv"], home)
    python = home / "venv" / "bin" / "python"
    _run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", archives[0]], home)
    packages = Path(_run([python, "-c", "import site; print(site.getsitepackages()[0])"], home).strip())
    # The dependencies come from this environment, as plain paths: its .pth files, among them the one that makes
    # gfkernels editable, are not read there.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    work = home / "work"
    work.mkdir()
    return python, work


def test_the_list_of_packages_is_complete() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    match = re.search(r"^packages = (\[.*?^\])", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    listed = set(ast.literal_eval(match[1]))
    assert listed == {Path(name).parent.as_posix().replace("/", ".") for name in _modules()}


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {Path(name).parent for name in _modules()}
    assert {folder / "__init__.py" for folder in folders} <= {Path(name) for name in _modules()}


def test_the_links_are_relative_links() -> None:
    """Copied as folders, the tree would hold every transport twice and import one of them."""
    for name in ("transport", "bindings"):
        assert os.readlink(ROOT / "gfkernels" / name) == f"../{name}"


@pytest.mark.slow
def test_wheel_holds_the_modules_and_nothing_else(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[0]) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
        licence = next(name for name in names if name.endswith("LICENSE"))
        assert "Apache License" in wheel.read(licence).decode()
    info = {name for name in names if re.match(r"gfkernels-[^/]+\.dist-info/", name)}
    assert names - info == _modules() | {"gfkernels/py.typed"}


@pytest.mark.slow
def test_sdist_holds_the_tests_and_what_they_check(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[1]) as sdist:
        members = {member.name.partition("/")[2]: member for member in sdist.getmembers()}
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]
    names = {name for name, member in members.items() if member.isfile()}
    inside = {name for name in names if name.startswith(("gfkernels/transport/", "gfkernels/bindings/"))}
    assert not inside, "modules twice in the sdist"
    for needed in (
        "transport/__init__.py",
        "bindings/__init__.py",
        "tests/test_packaging.py",
        "setup.cfg",
        "Makefile",
        "scripts/check",
        "LICENSE",
    ):
        assert needed in names, f"{needed} is not in the sdist"
    odd = {name for name in names if re.search(r"\.(py[co]|nb[ic]|so|log)$|(^|/)(build|dist|\.venv|\.git)/", name)}
    assert not odd


@pytest.mark.slow
def test_installed_elsewhere(elsewhere: tuple[Path, Path]) -> None:
    python, work = elsewhere
    code = """
import importlib.util, pathlib, sys
import gfkernels, gfkernels.transport, gfkernels.bindings
home = pathlib.Path(sys.prefix)
for module in (gfkernels, gfkernels.transport, gfkernels.bindings):
    assert home in pathlib.Path(module.__file__).parents, module.__file__
    assert not pathlib.Path(module.__file__).parent.is_symlink()
print(gfkernels.__version__)
for name in ("transport", "bindings"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed at the top level"
"""
    from gfkernels import __version__

    assert _run([python, "-c", code], work).strip() == __version__
    assert __version__ in _run([python, "-m", "pip", "show", "gfkernels"], work)
    assert "allreduce" in _run([python.parent / "gfkernels", "--help"], work).lower()


@pytest.mark.slow
def test_installed_elsewhere_it_reduces(elsewhere: tuple[Path, Path]) -> None:
    python, work = elsewhere
    script = work / "sum.py"
    script.write_text(
        "import numpy as np, gfkernels as gf\n"
        "with gf.init() as comm:\n"
        "    x = np.full(1000, comm.rank + 1, np.float32)\n"
        "    gf.allreduce(x)\n"
        "    assert (x == 3).all(), x\n"
        "    print('sum', x[0])\n"
    )
    out = _run([python.parent / "gfkernels", "run", "-n", "2", "--timeout", "100", script], work)
    assert out.count("sum 3.0") == 2, out


def test_the_source_folders_are_not_importable_by_themselves() -> None:
    for name in ("transport", "bindings"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0 and f"import gfkernels.{name}, not {name}" in done.stderr


@pytest.mark.slow
def test_import_brings_no_framework_and_starts_nothing(elsewhere: tuple[Path, Path]) -> None:
    python, work = elsewhere
    code = """
import os, signal, sys, threading
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
files = set(os.listdir("/proc/self/fd"))
import gfkernels
heavy = {"torch", "mpi4py", "pyverbs", "cupy", "jax", "matplotlib", "typer", "rich", "numba.cuda"}
heavy = (heavy | {"ml_dtypes"}) & set(sys.modules)
assert not heavy, heavy
assert threading.enumerate() == [threading.main_thread()]
assert set(os.listdir("/proc/self/fd")) == files
assert len(os.listdir("/proc/self/task")) == 1, "a native thread"
assert not gfkernels.is_initialized()
assert {number: signal.getsignal(number) for number in before} == before
"""
    # BLAS libraries start their threads when numpy is imported.
    _run([python, "-c", code], work, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")


@pytest.mark.slow
def test_import_costs_less_than_what_it_imports(elsewhere: tuple[Path, Path]) -> None:
    """Half a second beyond numba is the promise; a busy machine takes longer over both, so they are compared."""
    python, work = elsewhere
    code = """
import time
start = time.process_time()
import numba, numpy
middle = time.process_time()
import gfkernels
print((time.process_time() - middle) / (middle - start))
"""
    ratios = [float(_run([python, "-c", code], work)) for _ in range(3)]
    assert min(ratios) < 1, ratios
