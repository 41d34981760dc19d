"""Owns opened RDMA devices: one context and protection domain a device in this process, its memory, and its end.

Import this module before anything registers an atexit function that closes channels: those run in reverse order, and
devices must be the last to go.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import mmap
import os
import threading
from typing import Any, Final

from gfkernels.errors import UnavailableError, UsageError
from gfkernels.trace import log
from gfkernels.transport.announced import announced
from gfkernels.transport.verbs import memlock
from gfkernels.transport.verbs.compat import Pyverbs, error_code, load
from gfkernels.transport.verbs.memory import CardMemory
from gfkernels.transport.verbs.regions import Regions

_EVENTS: Final = "infinibandevent"


class Owned:
    """An object of pyverbs that is closed once, by this process only: a second close would free it twice."""

    def __init__(self, device: Device, thing: Any) -> None:
        self.thing = thing
        self._device = device
        device._children.append(self)

    @property
    def is_open(self) -> bool:
        """Whether it can be used."""
        return self.thing is not None

    def close(self) -> None:
        """Closes it; does nothing the second time. An error is logged: nobody could do anything about it."""
        thing, self.thing = self.thing, None
        if thing is None:
            return
        self._device._forget(self)
        if self._device.pid != os.getpid():
            return
        try:
            thing.close()
        except Exception as error:
            log.warning("RDMA: closing a %s of %s: %s", type(thing).__name__, self._device.name, error)


class Registration(Owned):
    """Memory that the card may reach.

    Attributes:
        address: of the first byte.
        nbytes: its size.
        lkey: key for this rank's requests.
        rkey: key for those of peers.
    """

    def __init__(self, device: Device, region: Any, address: int, nbytes: int, *, listed: bool) -> None:
        super().__init__(device, region)
        self.address, self.nbytes = address, nbytes
        self.lkey, self.rkey = int(region.lkey), int(region.rkey)
        self._row = device.regions.add(address, nbytes, self.lkey, self.rkey) if listed else None

    def close(self) -> None:
        """Takes it out of the table of regions, then deregisters it; does nothing the second time."""
        row, self._row = self._row, None
        if row is not None:
            self._device.regions.remove(row)
        super().close()


class Device:
    """An opened device. `open_device` makes them; every user calls `close` once.

    Attributes:
        name: such as "mlx5_0".
        verbs: pyverbs.
        context: its Context.
        pd: its PD.
        limits: what the card can do: pyverbs' DeviceAttr.
        regions: its table of registered memory.
        async_fd: readable when the card has news (see `events`); reading never blocks.
        pid: the process that opened it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = os.getpid()
        self.verbs: Pyverbs = load()
        self.regions = Regions()
        self.users = 1
        self._children: list[Owned] = []
        before = _event_fds()
        try:
            self.context = self.verbs.Context(name=name)
        except self.verbs.Error as error:
            raise UnavailableError(
                f"RDMA device {name} cannot be opened: {error}",
                "Check /dev/infiniband/uverbs* (there, and readable and writable for this user) and ibv_devinfo",
            ) from error
        try:
            self.pd = self.verbs.PD(self.context)
            self.limits = self.context.query_device()
        except self.verbs.Error as error:
            self.context.close()
            raise UnavailableError(f"RDMA device {name} cannot be used: {error}") from error
        opened = _event_fds() - before
        self.async_fd = min(opened) if opened else -1
        if self.async_fd >= 0:
            os.set_blocking(self.async_fd, False)
        self._memory = CardMemory(self)
        announced.listen(self._memory)

    def register(self, address: int, nbytes: int, *, listed: bool = True) -> Registration:
        """Lets the card, and peers that have the key, read and write this memory.

        Args:
            address: of the first byte; the memory must stay mapped until the registration is closed.
            nbytes: any size above 0.
            listed: compiled code finds its keys by address.

        Raises:
            UnavailableError: over the memlock limit, or the card has no room for it.
            UsageError: the memory is read-only or not mapped; or this is a forked child.
        """
        self.check_process()
        shortage = memlock.memlock().shortage(nbytes)
        if shortage is not None:
            raise UnavailableError(shortage, memlock.REMEDY)
        if not self.verbs.copies_on_fork and (address | nbytes) % mmap.PAGESIZE:
            _warn_of_forks(address, nbytes)
        try:
            region = self.verbs.MR(self.pd, nbytes, self.verbs.access, address=address)
        except self.verbs.Error as error:
            raise self._refused(error, address, nbytes) from error
        try:
            return Registration(self, region, address, nbytes, listed=listed)
        except UnavailableError:
            region.close()
            raise

    def _refused(self, error: Exception, address: int, nbytes: int) -> Exception:
        where = f"{nbytes:,} bytes at {address:#x} with RDMA device {self.name}"
        code = error_code(error)
        # Of unmapped memory, some kernels and libraries say that there is not enough.
        if code == errno.EFAULT or (code == errno.ENOMEM and not _is_writable(address, nbytes)):
            return UsageError(
                f"cannot register {where}: they are read-only, or not all of them are mapped. Pass writable memory"
            )
        if code == errno.ENOMEM:
            limit = memlock.memlock().limit_nbytes
            return UnavailableError(
                f"cannot register {where}: out of memory, or over the limit of locked memory, which is "
                f"{'unlimited' if limit is None else f'{limit:,} bytes'}",
                memlock.REMEDY,
            )
        return UnavailableError(f"cannot register {where}: {error}", f"The card has room for {self.limits.max_mr}")

    def create_cq(self, entries: int) -> Owned:
        """A completion queue of at least so many entries.

        Raises:
            UnavailableError: the card makes none so large, or no more of them.
        """
        most = int(self.limits.max_cqe)
        if entries > most:
            raise UnavailableError(
                f"a completion queue needs {entries} entries, and RDMA device {self.name} has at most {most}",
                "Spread the ranks over several devices, or use fewer ranks",
            )
        try:
            return Owned(self, self.verbs.CQ(self.context, entries, None, None, 0))
        except self.verbs.Error as error:
            raise UnavailableError(
                f"RDMA device {self.name} made no completion queue of {entries} entries: {error}"
            ) from error

    def check_process(self) -> None:
        """Raises UsageError in a forked child, which must not touch its parent's card."""
        if self.pid != os.getpid():
            raise UsageError(
                f"RDMA device {self.name} was opened by process {self.pid}, of which this one ({os.getpid()}) is a "
                "fork: call gfkernels.init in the child, or start it with spawn"
            )

    def close(self) -> None:
        """One user less; the last one closes the device."""
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            if _opened.get(self.name) is self:
                del _opened[self.name]
        self._destroy()

    def _forget(self, child: Owned) -> None:
        if child in self._children:
            self._children.remove(child)

    def _destroy(self) -> None:
        """Queue pairs, completion queues, memory, domain, context: each holds what follows it."""
        announced.ignore(self._memory)
        order = (self.verbs.QP, self.verbs.CQ, self.verbs.MR)
        for kind in order:
            for child in [child for child in self._children if isinstance(child.thing, kind)]:
                child.close()
        for thing in (self.pd, self.context):
            Owned(self, thing).close()
        self.pd = self.context = None


_lock: Final = threading.Lock()
_opened: Final[dict[str, Device]] = {}


def open_device(name: str) -> Device:
    """The device of this name, opened the first time; `close` it as often as it was asked for.

    Raises:
        UnavailableError: no pyverbs, or the device cannot be opened; says what would help.
    """
    with _lock:
        device = _opened.get(name)
        if device is None or device.pid != os.getpid():
            device = _opened[name] = Device(name)
        else:
            device.users += 1
        return device


def _event_fds() -> set[int]:
    """Descriptors that carry asynchronous events: pyverbs tells nobody which one is its context's."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if _EVENTS in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:
            continue
    return found


def _is_writable(address: int, nbytes: int) -> bool:
    """Whether all of it is mapped for writing."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, modes = line.split(maxsplit=2)[:2]
            start, end = (int(bound, 16) for bound in span.split("-"))
            if start <= address < end and "w" in modes:
                nbytes -= end - address
                address = end
                if nbytes <= 0:
                    return True
    return False


_warned = False


def _warn_of_forks(address: int, nbytes: int) -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning(
            "RDMA: %d bytes at %#x do not fill whole pages, and this kernel hides registered pages from forked "
            "children, with all else that lies in them. Use gfkernels.empty for what travels, or spawn, not fork",
            nbytes,
            address,
        )


def _leave_to_parent() -> None:
    """In a forked child: no destructor may close what the parent uses, so none may ever run."""
    for device in _opened.values():
        for thing in [device.pd, device.context, *[child.thing for child in device._children]]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    _opened.clear()


@atexit.register
def _close_all() -> None:
    """pyverbs' destructors log and fail in an interpreter that is half gone, so nothing is left to them."""
    while _opened:
        _, device = _opened.popitem()
        if device.pid == os.getpid():
            device._destroy()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
