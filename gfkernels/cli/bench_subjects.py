"""Owns who is measured: gfkernels with one kind of memory, and the peers gloo and MPI, all in one process and run."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

import gfkernels as gf
from gfkernels.cli.bench_case import Case
from gfkernels.types import DType

Array = npt.NDArray[Any]


class Subject(Protocol):
    """Something that can make the call of a case.

    Attributes:
        name: in the table.
        is_peer: not ours.
    """

    name: str
    is_peer: bool

    def open(self, case: Case) -> tuple[Array, Array, Callable[[], Any]]:
        """Input, output (the same array where the call works in place) and the call.

        Raises:
            Refused: it cannot make this call; on all ranks alike.
        """

    def plan(self) -> tuple[str, str, str]:
        """Name and hash of the plan that the last call followed, and the way to the peers' memory; empty for peers."""

    def close(self) -> None:
        """Lets go of the last case's arrays."""


class Refused(Exception):
    """A subject does not do a case; says why."""


class Ours:
    """gfkernels, with arrays from `gfkernels.empty` ("registered") or from numpy ("ordinary")."""

    is_peer = False

    def __init__(self, comm: gf.Communicator, memory: str, persistent: bool) -> None:
        self.name = memory
        self._comm, self._persistent = comm, persistent
        self._handle: gf.PersistentCall | None = None

    def open(self, case: Case) -> tuple[Array, Array, Callable[[], Any]]:
        """See `Subject`."""
        comm = self._comm
        make = gf.empty if self.name == "registered" else _ordinary
        source = make(case.source_count, case.dtype.numpy)
        target = source if case.in_place else make(case.target_count, case.dtype.numpy)
        wire: dict[str, Any] = {} if case.wire is None else {"wire": case.wire.name}
        call: Callable[[], Any]
        if case.collective == "allreduce":
            if self._persistent:
                self._handle = comm.plan_allreduce(source, case.op, **wire)
                return source, target, self._handle
            out: dict[str, Any] = {} if case.in_place else {"out": target}
            call = functools.partial(comm.allreduce, source, case.op, **out, **wire)
        elif case.collective == "reduce_scatter":
            call = functools.partial(comm.reduce_scatter, source, case.op, out=target, **wire)
        elif case.collective == "allgather":
            call = functools.partial(comm.allgather, source, out=target.reshape(case.n, -1), **wire)
        elif case.collective == "broadcast":
            call = functools.partial(comm.broadcast, source, case.root)
        else:
            call = comm.barrier
        return source, target, call

    def plan(self) -> tuple[str, str, str]:
        """See `Subject`."""
        if self._handle is not None and self._comm.size > 1:
            name = self._handle.plan_name
            way = name.partition(".")[2] or self._handle.kind.name.lower()
            transport = self._comm.transport
            return name, self._handle.plan_hash, way if transport in ("shm", "cma") else transport
        last = self._comm.last_call
        return ("", "", "") if last is None else (last.plan_name, last.plan_hash, last.path)

    def close(self) -> None:
        """See `Subject`."""
        self._handle = None


class Gloo:
    """torch.distributed's CPU backend."""

    name = "gloo"
    is_peer = True

    def __init__(self, comm: gf.Communicator) -> None:
        if comm.local_size == comm.size:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Otherwise every rank's sums run on all cores, which the other ranks need.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._torch = importlib.import_module("torch")
        self._dist = importlib.import_module("torch.distributed")
        self._dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)

    def open(self, case: Case) -> tuple[Array, Array, Callable[[], Any]]:
        """See `Subject`."""
        dist = self._dist
        ops = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
        if case.op not in ops:
            raise Refused(f"gloo has no {case.op}")
        if case.wire is not None:
            raise Refused("gloo has no wire dtype")
        op = getattr(dist.ReduceOp, ops[case.op])
        source = _ordinary(case.source_count, case.dtype.numpy)
        target = source if case.in_place else _ordinary(case.target_count, case.dtype.numpy)
        x, y = self._tensor(source, case.dtype), self._tensor(target, case.dtype)
        call: Callable[[], Any]
        if case.collective == "allreduce" and case.in_place:
            call = functools.partial(dist.all_reduce, x, op)
        elif case.collective == "reduce_scatter":
            call = functools.partial(self._first_of("reduce_scatter_single", "reduce_scatter_tensor"), y, x, op)
        elif case.collective == "allgather":
            call = functools.partial(self._first_of("all_gather_single", "all_gather_into_tensor"), y, x)
        elif case.collective == "broadcast":
            call = functools.partial(dist.broadcast, x, case.root)
        elif case.collective == "barrier":
            call = dist.barrier
        else:
            raise Refused("gloo has no allreduce out of place")
        _try("gloo", source, call)
        return source, target, call

    def _first_of(self, *names: str) -> Callable[..., Any]:
        # torch renamed some in 2.13; the old names warn.
        found: Callable[..., Any] = next(getattr(self._dist, name) for name in names if hasattr(self._dist, name))
        return found

    def _tensor(self, array: Array, dtype: DType) -> Any:
        if dtype.name == "bfloat16":
            return self._torch.from_numpy(array.view(np.uint16)).view(self._torch.bfloat16)
        try:
            return self._torch.from_numpy(array)
        except TypeError as error:
            raise Refused(f"torch: {error}") from None

    def plan(self) -> tuple[str, str, str]:
        """See `Subject`."""
        return "", "", ""

    def close(self) -> None:
        """See `Subject`."""


class Mpi:
    """An MPI library through mpi4py."""

    is_peer = True
    _TYPES: ClassVar = {
        "float64": "DOUBLE",
        "float32": "FLOAT",
        "float16": "FLOAT16_T",
        "bool": "C_BOOL",
        **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}_T" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    }

    def __init__(self, comm: gf.Communicator) -> None:
        self._mpi = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        if (self._world.rank, self._world.size) != (comm.rank, comm.size):
            raise RuntimeError(
                f"it says rank {self._world.rank} of {self._world.size}: mpi4py loaded another MPI than mpiexec's, or "
                "these ranks were not started by mpiexec"
            )
        self.name = library_name(str(self._mpi.Get_library_version()))

    def open(self, case: Case) -> tuple[Array, Array, Callable[[], Any]]:
        """See `Subject`."""
        mpi, world = self._mpi, self._world
        if case.op == "mean":
            raise Refused("MPI has no mean")
        if case.wire is not None:
            raise Refused("MPI has no wire dtype")
        kind = getattr(mpi, self._TYPES.get(case.dtype.name, ""), mpi.DATATYPE_NULL)
        if kind == mpi.DATATYPE_NULL:
            raise Refused(f"{self.name} has no {case.dtype.name}")
        op = getattr(mpi, case.op.upper())
        source = _ordinary(case.source_count, case.dtype.numpy)
        target = source if case.in_place else _ordinary(case.target_count, case.dtype.numpy)
        # Without counts: mpi4py finds them, and divides them by the ranks where a call wants that.
        x, y = ([array.view(np.uint8), kind] for array in (source, target))
        call: Callable[[], Any]
        if case.collective == "allreduce":
            call = functools.partial(world.Allreduce, mpi.IN_PLACE if case.in_place else x, y, op)
        elif case.collective == "reduce_scatter":
            call = functools.partial(world.Reduce_scatter_block, x, y, op)
        elif case.collective == "allgather":
            call = functools.partial(world.Allgather, x, y)
        elif case.collective == "broadcast":
            call = functools.partial(world.Bcast, x, case.root)
        else:
            call = world.Barrier
        _try(self.name, source, call)
        return source, target, call

    def plan(self) -> tuple[str, str, str]:
        """See `Subject`."""
        return "", "", ""

    def close(self) -> None:
        """See `Subject`."""


def library_name(version: str) -> str:
    """An MPI library's name and version, short."""
    line = version.strip().splitlines()[0] if version.strip() else "MPI"
    for name, words in (("Open MPI", 3), ("MPICH", 3), ("Intel", 6)):
        if line.startswith(name):
            text = " ".join(line.replace("v", " ", 1).replace(",", " ").split()[:words])
            return text.replace("Version: ", "").replace("(R)", "").replace(" Library", "")[:16].strip()
    return line[:16].strip()


def peers(comm: gf.Communicator, wanted: dict[str, str]) -> tuple[list[Subject], dict[str, str]]:
    """Brings up the peers that all ranks can use.

    Args:
        comm: ours, over which the ranks agree.
        wanted: "gloo" and "mpi", each with "" or the reason why it was not even tried.

    Returns:
        The peers, and by name why others are left out.
    """
    found: list[Subject] = []
    reasons = {name: why for name, why in wanted.items() if why}
    kinds: dict[str, Callable[[gf.Communicator], Subject]] = {"gloo": Gloo, "mpi": Mpi}
    for name, make in kinds.items():
        if wanted.get(name) != "":
            continue
        subject, why = None, ""
        try:
            subject = make(comm)
        except Exception as error:  # whatever a foreign library raises while it starts
            why = _first_line(error)
        failed = np.array([subject is None], np.int32)
        comm.allreduce(failed)
        if subject is not None and not failed[0]:
            found.append(subject)
        else:
            reasons[name] = why or f"{failed[0]} of {comm.size} ranks cannot use it"
    return found, reasons


def _ordinary(count: int, dtype: Any) -> Array:
    return np.empty(count, dtype)


def _try(name: str, source: Array, call: Callable[[], Any]) -> None:
    # Peers check types before they talk, so a refusal comes on all ranks alike.
    source.view(np.uint8)[...] = 0
    try:
        call()
    except Exception as error:
        raise Refused(f"{name}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
