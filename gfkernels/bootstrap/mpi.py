"""Owns talking to mpi4py: rank 0's address and secret travel to the others by an MPI broadcast, as JSON bytes."""

from __future__ import annotations

import atexit
import importlib.util
import json
import struct
from typing import Any, Final

from gfkernels.bootstrap.launchers import MPI_SOURCES
from gfkernels.bootstrap.world import World
from gfkernels.errors import BootstrapError
from gfkernels.trace import log

_LENGTH: Final = struct.Struct(">Q")
_KEY_BYTES: Final = 64


def communicator_of(world: World) -> Any:
    """The mpi4py communicator that reaches all ranks of the world, None where there is none.

    Under an MPI launcher mpi4py is imported here, which initialises MPI.
    """
    if world.comm is not None:
        return world.comm
    if world.source not in MPI_SOURCES or importlib.util.find_spec("mpi4py") is None:
        return None
    try:
        MPI = _load(world.source)
    except (ImportError, RuntimeError) as error:
        log.info("mpi4py cannot be loaded (%s): the ranks meet at an address from the launcher's variables", error)
        return None
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    comm = MPI.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (world.rank, world.size):
        # Built against another MPI than the launcher's: every process believes that it is alone.
        log.info(
            "mpi4py says rank %d of %d, the launcher (%s) %d of %d: mpi4py belongs to another MPI and is not used",
            comm.Get_rank(),
            comm.Get_size(),
            world.source,
            world.rank,
            world.size,
        )
        return None
    return comm


def _load(source: str) -> Any:
    """mpi4py's MPI, initialised unless its owner wants otherwise or it is another MPI than the launcher's."""
    import mpi4py

    initialises = mpi4py.rc.initialize
    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc.initialize = initialises
    if MPI.Is_initialized() or not initialises:
        return MPI
    vendor = MPI.get_vendor()[0]
    # Some libraries end the process rather than be started by a foreign launcher, so ask first.
    if (source == "Open MPI") != (vendor == "Open MPI") and source != "PMIx":
        log.info("mpi4py belongs to %s, the launcher is %s: mpi4py is not used", vendor, source)
        return MPI
    level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}"))
    # mpi4py itself ends only what it began on import.
    atexit.register(_finalize, MPI)
    return MPI


def _finalize(MPI: Any) -> None:
    if not MPI.Is_finalized():
        MPI.Finalize()


def broadcast(comm: Any, payload: dict[str, Any] | None) -> dict[str, Any]:
    """Rank 0's payload on every rank. Bytes, not objects: mpi4py would pickle those."""
    body = json.dumps(payload).encode() if comm.Get_rank() == 0 else b""
    length = bytearray(_LENGTH.pack(len(body)))
    comm.Bcast(length, root=0)
    buffer = bytearray(body) if body else bytearray(_LENGTH.unpack(bytes(length))[0])
    comm.Bcast(buffer, root=0)
    received = json.loads(bytes(buffer))
    if "error" in received:
        raise BootstrapError(str(received["error"]))
    return dict(received)


def all_equal(comm: Any, key: str) -> bool:
    """Whether all ranks gave the same key (of up to 64 bytes)."""
    mine = key.encode()[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0")
    every = bytearray(_KEY_BYTES * comm.Get_size())
    comm.Allgather(mine, every)
    return bytes(every) == mine * int(comm.Get_size())
