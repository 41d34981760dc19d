"""Owns the module-level API: the default communicator, its collectives as functions, and shareable memory."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from gfkernels import arrays
from gfkernels.bootstrap import World, discover
from gfkernels.communicator import Communicator, PersistentCall, start
from gfkernels.communicator.site import graveyard, process_arena
from gfkernels.config import Config
from gfkernels.errors import UnavailableError, UsageError
from gfkernels.transport.announced import announced

_default: Communicator | None = None
_world: World | None = None
_owner = 0
_lock = threading.RLock()


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    store: str | None = None,
    comm: Any = None,
    config: Config | None = None,
    **options: Any,
) -> Communicator:
    """Joins the other ranks and makes the default communicator.

    Who the ranks are comes from the arguments, else from the launcher's variables (torchrun's names, Open MPI, MPICH,
    Intel MPI, Slurm, `gfkernels run`), else this process is alone. All ranks call it. A second call for the same world
    returns the same communicator; after `shutdown`, or after a failure broke it, it makes a new one.

    Args:
        rank: this process's rank, 0 to size - 1; together with `size`.
        size: number of ranks.
        store: "host:port" where rank 0 listens and the others find it.
        comm: an mpi4py communicator whose ranks take part; address and secret travel over it.
        config: all settings; None: from `GFKERNELS_*`.
        **options: single settings by name (`gfkernels.Config` lists them), such as `transport="tcp"`.

    Returns:
        The default communicator, also a context manager that shuts it down.

    Raises:
        ConfigError: an unknown or bad setting or launcher variable.
        BootstrapError: ranks did not appear, or would not accept each other.
        UnavailableError: a transport asked for by name cannot be used here.
        UsageError: there is a default communicator of another world.
    """
    global _default, _world, _owner
    with _lock:
        loaded = Config.load(options, os.environ, config)
        world = discover(os.environ, rank=rank, size=size, store=store, comm=comm, job_id=loaded.job_id)
        if _default is not None and _owner == os.getpid():
            if _default.is_usable:
                return _same_world(_default, world, loaded)
            _default.shutdown()
        _default = None
        _default, _world, _owner = start(world, loaded), world, os.getpid()
        return _default


def _same_world(current: Communicator, world: World, config: Config) -> Communicator:
    if world != _world:
        raise UsageError(
            f"gfkernels is initialised as rank {current.rank} of {current.size} ({_world and _world.source}), and this "
            f"call asks for rank {world.rank} of {world.size} ({world.source}): call gfkernels.shutdown first"
        )
    if config != current.config:
        raise UsageError(
            "gfkernels is initialised with other settings than this call asks for: call gfkernels.shutdown first"
        )
    return current


def shutdown() -> None:
    """Lets go of the default communicator; without one does nothing. Waits for no other rank."""
    global _default
    with _lock:
        comm, _default = _default, None
        if comm is not None:
            comm.shutdown()


@atexit.register
def _shutdown_at_exit() -> None:
    if _default is None or _owner != os.getpid():
        return
    # After an error that nobody caught, peers must not take this rank for one that left in good order.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if isinstance(error, BaseException) and not hasattr(sys, "ps1"):
        _default.crash(error)
    shutdown()


def is_initialized() -> bool:
    """Whether there is a default communicator that calls can be made on."""
    return _default is not None and _owner == os.getpid() and _default.is_usable


def default_communicator() -> Communicator:
    """The communicator that `init` made.

    Raises:
        UsageError: there is none.
    """
    if _default is None:
        raise UsageError("gfkernels is not initialised: call gfkernels.init() first")
    return _default


def rank() -> int:
    """This process's rank."""
    return default_communicator().rank


def size() -> int:
    """Number of ranks."""
    return default_communicator().size


def local_rank() -> int:
    """This process's place among the ranks of its host."""
    return default_communicator().local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return default_communicator().local_size


def allreduce(x: Any, op: str = "sum", *, out: Any = None, wire: str | None = None, async_op: bool = False) -> Any:
    """Reduces arrays of all ranks element by element, in place. See `Communicator.allreduce`."""
    comm = _default
    if comm is None:
        comm = default_communicator()
    if out is None and wire is None and not async_op:
        return comm.allreduce(x, op)  # keywords cost a tenth of a small call
    return comm.allreduce(x, op, out=out, wire=wire, async_op=async_op)


def reduce_scatter(x: Any, op: str = "sum", *, out: Any = None, wire: str | None = None, async_op: bool = False) -> Any:
    """Reduces, and leaves every rank its block of the result. See `Communicator.reduce_scatter`."""
    return default_communicator().reduce_scatter(x, op, out=out, wire=wire, async_op=async_op)


def allgather(x: Any, *, out: Any = None, wire: str | None = None, async_op: bool = False) -> Any:
    """Gives every rank the arrays of all ranks. See `Communicator.allgather`."""
    return default_communicator().allgather(x, out=out, wire=wire, async_op=async_op)


def broadcast(x: Any, root: int = 0, *, async_op: bool = False) -> Any:
    """Copies the root's array into everybody's. See `Communicator.broadcast`."""
    return default_communicator().broadcast(x, root, async_op=async_op)


def barrier() -> None:
    """Returns once all ranks have called it. See `Communicator.barrier`."""
    default_communicator().barrier()


def allreduce_many(xs: Sequence[Any], op: str = "sum", *, wire: str | None = None) -> list[Any]:
    """Reduces a list of arrays with one synchronisation. See `Communicator.allreduce_many`."""
    return default_communicator().allreduce_many(xs, op, wire=wire)


def plan_allreduce(x: Any, op: str = "sum", *, wire: str | None = None) -> PersistentCall:
    """A handle that reduces `x` each time it is called. See `Communicator.plan_allreduce`."""
    return default_communicator().plan_allreduce(x, op, wire=wire)


def empty(shape: int | Sequence[int], dtype: Any = "float32", *, device: str | None = None) -> npt.NDArray[Any]:
    """A numpy array, of arbitrary contents, in memory that this host's other ranks reach directly.

    Collectives on it, and on views of it, copy nothing on the way. The memory is given back with its last view.

    Args:
        shape: as for `numpy.empty`.
        dtype: one of the supported dtypes, by name or as numpy's or ml_dtypes'.
        device: None or "cpu".

    Raises:
        UsageError: a bad shape or dtype, or not enough memory.
        UnavailableError: another device.
    """
    if device not in (None, "cpu"):
        raise UnavailableError(f"device={device!r}: this release has host memory only", 'Use device="cpu"')
    graveyard.reap()
    return process_arena().empty(shape, dtype)


def zeros(shape: int | Sequence[int], dtype: Any = "float32", *, device: str | None = None) -> npt.NDArray[Any]:
    """Like `empty`, filled with zeros."""
    array = empty(shape, dtype, device=device)
    array[...] = np.zeros((), array.dtype)
    return array


class Registration:
    """What `register` returns: a context manager that unregisters."""

    def __init__(self, x: Any) -> None:
        self.array = x

    def __enter__(self) -> Any:
        return self.array

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unregister(self.array)


_registered: dict[tuple[int, int], list[tuple[Any, int]]] = {}


def register(x: Any) -> Registration:
    """Announces ordinary memory that collectives will use many times.

    On one host this cannot make it shared: arrays from `gfkernels.empty` are faster. It checks that peers can reach the
    array as it is, without a temporary, and has RDMA cards that are or will be in use prepare it. Keep it registered
    for as long as calls use it: registering takes a card milliseconds.

    Returns:
        A context manager that gives `x` and unregisters it at its end.

    Raises:
        UsageError: not contiguous, read-only, or not an array that can be reduced.
    """
    array = arrays.inspect(x)
    if array.staging is not None:
        raise UsageError(
            f"register: x (shape {array.shape}, strides {array.strides} bytes, {array.framework}) is strided or "
            "immutable and travels through a temporary; register a contiguous array"
        )
    with _lock:
        key = announced.add(array.address, array.nbytes)
        _registered.setdefault((array.address, array.nbytes), []).append((x, key))
    return Registration(x)


def unregister(x: Any) -> None:
    """Takes back `register(x)`.

    Raises:
        UsageError: it was not registered.
    """
    array = arrays.inspect(x)
    with _lock:
        known = _registered.get((array.address, array.nbytes))
        if not known:
            raise UsageError(f"unregister: no array of {array.nbytes} bytes at {array.address:#x} is registered")
        announced.remove(known.pop()[1])
        if not known:
            del _registered[array.address, array.nbytes]
