"""Owns the variables by which torchrun and the MPI launchers tell a process its rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gfkernels.errors import ConfigError


@dataclass(frozen=True)
class Found:
    """What a launcher's variables say; None where they do not."""

    source: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    job_id: str
    first_host: str = ""


def optional_integer(environ: Mapping[str, str], name: str) -> int | None:
    """A variable as a non-negative integer, None where it is not set.

    Raises:
        ConfigError: it is something else.
    """
    text = environ.get(name)
    if text is None or not text.strip():
        return None
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected an integer") from None
    if value < 0:
        raise ConfigError(f"{name}={text!r}: expected an integer that is not negative")
    return value


def rank_and_size(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int] | None:
    """The pair of variables, None where neither is set.

    Raises:
        ConfigError: only one is set, or they contradict each other.
    """
    rank, size = optional_integer(environ, rank_name), optional_integer(environ, size_name)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        given, lacking = (rank_name, size_name) if size is None else (size_name, rank_name)
        raise ConfigError(f"{given}={environ[given]} is set but {lacking} is not: set both or neither")
    if size < 1 or rank >= size:
        raise ConfigError(f"{rank_name}={rank} and {size_name}={size} contradict each other: a rank is below the size")
    return rank, size


def _torchrun(environ: Mapping[str, str]) -> Found | None:
    pair = rank_and_size(environ, "RANK", "WORLD_SIZE")
    if pair is None:
        return None
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    job = f"torchrun-{run}.{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if run else ""
    return Found(
        "torchrun",
        *pair,
        optional_integer(environ, "LOCAL_RANK"),
        optional_integer(environ, "LOCAL_WORLD_SIZE"),
        job,
    )


@dataclass(frozen=True)
class _Family:
    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()

    def __call__(self, environ: Mapping[str, str]) -> Found | None:
        if self.rank not in environ and self.size not in environ:
            return None
        pair = rank_and_size(environ, self.rank, self.size)
        if pair is None:
            return None
        local_rank, local_size = optional_integer(environ, self.local_rank), optional_integer(environ, self.local_size)
        job = next((f"{name}-{environ[name]}" for name in self.job if environ.get(name)), "")
        return Found(self.source, *pair, local_rank, local_size, job)


def _pmi(environ: Mapping[str, str]) -> Found | None:
    # Slurm's PMI plug-ins set the rank and size but not the local names; its own variables say more.
    if "MPI_LOCALRANKID" not in environ and "SLURM_STEP_ID" in environ:
        return None
    family = _Family("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_ID_JOB",))
    return family(environ)


def _pmix(environ: Mapping[str, str]) -> Found | None:
    if "PMIX_RANK" not in environ or "SLURM_STEP_ID" in environ:
        return None
    if "PMIX_SIZE" not in environ:
        raise ConfigError(
            f"PMIX_RANK={environ['PMIX_RANK']} is set, but PMIx tells the number of ranks only to its own library: "
            "install mpi4py, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    return _Family("PMIx", "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE", ("PMIX_NAMESPACE",))(environ)


FAMILIES: Final[tuple[Callable[[Mapping[str, str]], Found | None], ...]] = (
    _torchrun,
    _Family(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    ),
    _Family(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _pmi,
    _pmix,
)
"""In the order in which they are asked; Slurm's own variables come after."""

MPI_SOURCES: Final = ("Open MPI", "MVAPICH", "MPICH", "PMIx")

_LAUNCHERS: Final = ("hydra_pmi_proxy", "hydra_bstrap_pr", "mpiexec", "mpirun", "prte", "prted", "orted", "orterun")


def launcher_id() -> str:
    """Names the launcher's process on this host, which all local ranks descend from; for jobs without an id."""
    pid = os.getppid()
    ancestor = pid
    while ancestor > 1:
        name, parent, started = _process(ancestor)
        if any(name.startswith(launcher[:15]) for launcher in _LAUNCHERS):
            return f"{name}-{ancestor}-{started}"
        ancestor = parent
    return f"parent-{pid}-{_process(pid)[2]}"


def _process(pid: int) -> tuple[str, int, str]:
    # Fields 4 and 22 of /proc/pid/stat; the name (field 2) is in parentheses and may hold anything.
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0, ""
    name = text[text.index("(") + 1 : text.rindex(")")]
    fields = text[text.rindex(")") + 2 :].split()
    return name, int(fields[1]), fields[19]
