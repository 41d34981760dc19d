"""Owns a communicator's end of the data plane: its context, control block, buffers, transport table and descriptors.

Transports are imported where they are used: their functions compile on import, which is for `start` to arrange.
"""

from __future__ import annotations

import contextlib
import os
import select
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from gfkernels.arrays import fast
from gfkernels.communicator.programs import Terrain
from gfkernels.communicator.site import Site, graveyard
from gfkernels.config import Config
from gfkernels.engine.context import HEADER_NBYTES, MAX_LANES, N_CTX_WORDS, Ctx, Kind
from gfkernels.errors import PeerLostError, TransportError
from gfkernels.native.libc import publish
from gfkernels.transport.announced import announced
from gfkernels.transport.arena import Block
from gfkernels.transport.table import N_SLOTS, Channels, Fault, Slot
from gfkernels.types import N_BUFFERS, N_CHANNELS, Buffer

if TYPE_CHECKING:
    from gfkernels.transport.cma import CmaState
    from gfkernels.transport.framed import FramedChannels

_LINE: Final = 64
_PAGE: Final = 4096
_SPIN_US: Final = 200
"""How long a wait spins where every rank has a core: longer than the usual skew of ranks, shorter than a time slice."""
_ROUNDS_PER_US: Final = 15
_SLICE_NS: Final = 50_000_000
_BROKEN: Final = 1
_FORKED: Final = 2


class Group(Protocol):
    """Who takes part: what `Plane` needs to know of a communicator's ranks."""

    site: Site
    name: str
    members: tuple[int, ...]
    rank: int
    config: Config

    @property
    def size(self) -> int:
        """Ranks."""

    def exchange(self, value: Any) -> list[Any]:
        """An all-gather of JSON among the members."""


class Plane:
    """The words and memory that compiled code works on. Keeps everything alive that it names.

    Attributes:
        words: the context (`Ctx`).
        ctx: its address.
        terrain: what plans depend on.
        transport: "shm", "cma", "verbs" or "tcp": what carries this group.
        same_host: whether calls begin with ENTER through shared memory.
    """

    def __init__(self, group: Group) -> None:
        site, size = group.site, group.size
        self.group = group
        self.words: npt.NDArray[np.int64] = np.zeros(N_CTX_WORDS, np.int64)
        self.ctx = int(self.words.ctypes.data)
        self.same_host = site.shares_memory
        self._keep: list[Any] = []
        self._block: Block | None = None
        self._aborts: dict[int, int] = {}
        self._connections: FramedChannels | None = None
        self._stage_key = -1
        self._cma_state: CmaState | None = None
        self._scratch: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._pid = os.getpid()
        self._closed = False
        self.places = self._words(2, size, N_BUFFERS)
        self.stages = self._words(size)
        # On one host these become the least of all ranks': peers reach into each other's.
        self._inline_bytes, self._staging_bytes = group.config.inline_bytes, group.config.staging_bytes
        self.transport = "cma" if group.config.transport == "cma" else "shm"
        channels = self._shared() if self.same_host else self._connected()
        self.channels: Channels = channels
        self._fill(channels)
        config = group.config
        settings: dict[str, Any] = {
            "plan": config.plan,
            "segment_bytes": config.segment_bytes,
            "lanes": config.lanes,
            "inline_bytes": self._inline_bytes,
            "staging_bytes": self._staging_bytes,
        }
        if config.transport == "cma":
            settings["cma_min_bytes"] = 0
        self.terrain = Terrain(group.rank, size, self.same_host, settings, self.places, self.scratch)
        _planes.add(self)
        site.events.add_watcher(self)

    # -- building ----------------------------------------------------------------------------------------------

    def _words(self, *shape: int) -> npt.NDArray[np.int64]:
        words: npt.NDArray[np.int64] = np.zeros(shape, np.int64)
        self._keep.append(words)
        return words

    def _shared(self) -> Channels:
        """The control block: abort word, two header areas, arrivals, two INLINE areas, STAGE."""
        from gfkernels.transport import shm

        group, site = self.group, self.group.site
        arrivals_at = _PAGE + 2 * HEADER_NBYTES
        inline_at = _pages(arrivals_at + shm.arrivals_nbytes(group.size))
        stage_at = inline_at + 2 * _inline_nbytes(group.config.inline_bytes)
        nbytes = stage_at + group.config.staging_bytes
        self._block = site.arena.allocate(nbytes)
        control: npt.NDArray[np.uint8] = self._block.array((stage_at,), np.uint8)
        control[:] = 0
        mine = {
            "offset": self._block.offset,
            "inline_bytes": group.config.inline_bytes,
            "staging_bytes": group.config.staging_bytes,
        }
        told = group.exchange(mine)
        self._inline_bytes = min(fact["inline_bytes"] for fact in told)
        self._staging_bytes = min(fact["staging_bytes"] for fact in told)
        bases = [site.addresses[q] + fact["offset"] for q, fact in zip(group.members, told, strict=True)]
        headers, shifts = self._words(group.size), self._words(group.size)
        for q, (base, fact) in enumerate(zip(bases, told, strict=True)):
            headers[q] = base + _PAGE
            shifts[q] = site.addresses[group.members[q]] - site.remote_addresses[group.members[q]]
            inline_nbytes = _inline_nbytes(fact["inline_bytes"])
            for parity in (0, 1):
                self.places[parity, q, Buffer.INLINE] = base + inline_at + parity * inline_nbytes
            self.stages[q] = base + inline_at + 2 * inline_nbytes
        self._aborts = {q: base for q, base in enumerate(bases) if q != group.rank}
        words = self.words
        words[Ctx.HEADERS], words[Ctx.SHIFTS] = headers.ctypes.data, shifts.ctypes.data
        words[Ctx.ARENA], words[Ctx.ARENA_NBYTES] = site.arena.address, site.arena.size
        words[Ctx.ABORT] = bases[group.rank]
        self._allow_cma()
        return shm.channels(group.rank, [base + arrivals_at for base in bases])

    def _allow_cma(self) -> None:
        group, site, words = self.group, self.group.site, self.words
        words[Ctx.BEST_KIND] = Kind.CMA if group.config.transport == "cma" else Kind.REGISTERED
        if site.cma_reason:
            return
        from gfkernels.transport import cma

        state = cma.state([site.pids[q] for q in group.members])
        put, get = cma.cma_functions()
        table = self._words(group.size, N_SLOTS)
        table[:, Slot.STATE], table[:, Slot.PUT], table[:, Slot.GET] = state.address, put, get
        words[Ctx.CMA_CHANNELS], words[Ctx.CMA_OK] = table.ctypes.data, 1
        self._cma_state = state

    def _connected(self) -> Channels:
        """A network between all members; STAGE is private memory."""
        from gfkernels.communicator import network

        group, config = self.group, self.group.config
        stage: npt.NDArray[np.uint8] = np.zeros(config.staging_bytes + _PAGE, np.uint8)
        self._keep.append(stage)
        self.stages[group.rank] = at = _pages(int(stage.ctypes.data))
        self.transport, connected = network.connect(group.rank, group.size, group.site, config, group.exchange)
        self._connections = connected
        self._stage_key = announced.add(at, config.staging_bytes)
        abort = self._words(8)
        self.words[Ctx.ABORT] = abort.ctypes.data
        return connected

    def _fill(self, channels: Channels) -> None:
        group, words = self.group, self.words
        size = group.size
        operands = 4 * size + 8
        words[Ctx.RANK], words[Ctx.SIZE] = group.rank, size
        words[Ctx.PLACES], words[Ctx.STAGES] = self.places.ctypes.data, self.stages.ctypes.data
        words[Ctx.CHANNELS] = words[Ctx.TABLE] = channels.table.ctypes.data
        words[Ctx.HAS_CALLS] = bool(channels.table[:, [Slot.BEGIN, Slot.PROGRESS, Slot.FLUSH]].any())
        words[Ctx.BASES] = self._words(size, N_CHANNELS).ctypes.data
        words[Ctx.PCS] = self._words(MAX_LANES).ctypes.data
        words[Ctx.ENDS] = self._words(MAX_LANES).ctypes.data
        words[Ctx.NEXT_PEERS] = self._words(MAX_LANES).ctypes.data
        words[Ctx.POINTERS] = self._words(operands).ctypes.data
        words[Ctx.COUNTS] = self._words(8).ctypes.data
        words[Ctx.LANDINGS] = self._words(2, N_BUFFERS, 2).ctypes.data
        words[Ctx.TIMESPEC] = self._words(2).ctypes.data
        words[Ctx.SLICE_NS] = _SLICE_NS
        words[Ctx.SPIN_ROUNDS] = self.spin_rounds
        events = group.site.events.fds
        fds = self._words(len(events) + len(channels.block_fds))
        for i, fd in enumerate([*events, *channels.block_fds]):
            fds[i] = _pollfd(fd)
        self._pollfds = fds
        words[Ctx.FDS], words[Ctx.N_FDS], words[Ctx.N_EVENT_FDS] = fds.ctypes.data, len(fds), len(events)

    @property
    def spin_rounds(self) -> int:
        """Idle rounds that spin: none where ranks share cores."""
        config, hosts = self.group.config, self.group.site.session.hosts
        if config.spin_us is not None:
            return config.spin_us * _ROUNDS_PER_US
        return 0 if hosts.oversubscribed else _SPIN_US * _ROUNDS_PER_US

    # -- in use ------------------------------------------------------------------------------------------------

    def scratch(self, nbytes: int) -> int:
        """The address of at least `nbytes` of private memory; earlier ones stay valid."""
        if self._scratch.nbytes < nbytes + _PAGE:
            self._scratch = np.zeros(nbytes + _PAGE, np.uint8)
            self._keep.append(self._scratch)
        return _pages(int(self._scratch.ctypes.data))

    def drop_fd(self, fd: int) -> None:
        """Stop polling a descriptor that stays readable."""
        for i, word in enumerate(self._pollfds):
            if int(word) & 0xFFFFFFFF == fd:
                self._pollfds[i] = _pollfd(-1)

    def refuse(self) -> None:
        """From now on every call is refused at once."""
        self.words[Ctx.REFUSE] = _BROKEN

    def sever(self) -> None:
        """Nothing that is under way in a network lands here any more; the engine stands still in a call that failed."""
        if self._connections is not None and not self.forked:
            self._connections.sever()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy."""
        return os.getpid() != self._pid

    def tell_abort(self) -> None:
        """Sets the abort word of every same-host peer, whose wait loops look at it."""
        for address in self._aborts.values():
            publish(address, 1)

    def fault(self) -> tuple[Fault, int, TransportError]:
        """After `Code.FAULT`: what a transport function reported, the peer, and the exception for it."""
        fault, peer = Fault(int(self.words[Ctx.FAULT])), int(self.words[Ctx.PEER])
        if self._cma_state is not None and self._cma_state.fault is not None:
            text = self._cma_state.explain()
            error = PeerLostError(text, peer) if fault is Fault.PEER_LOST else TransportError(text)
            return fault, peer, error
        if self._connections is not None:
            return fault, peer, self._connections.error(peer)
        return fault, peer, TransportError(f"the transport to rank {peer} reported {fault.name}")

    def mismatched_call(self, peer: int) -> int:
        """After `Fault.MISMATCH`: the number of the call in which `peer` asked for something else."""
        if self._connections is None:
            return int(self.words[Ctx.SEQUENCE])
        return self._connections.mismatched_call(peer)

    def close(self, *, leave: bool, is_safe: Callable[[], bool]) -> None:
        """Lets go of connections and memory; what peers may still touch is kept until `is_safe()`."""
        if self._closed:
            return
        self._closed = True
        self.refuse()
        if self._connections is not None and not self.forked:
            self._connections.close(timeout_s=2.0, leave=leave)
            announced.remove(self._stage_key)
        if self._block is not None and not self.forked:
            graveyard.bury(is_safe, self._block)
        self._block = None


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _inline_nbytes(inline_bytes: int) -> int:
    return _pages(max(_LINE, inline_bytes))


def _pollfd(fd: int) -> int:
    # struct pollfd as one little-endian word: int fd, short events, short revents.
    return (fd & 0xFFFFFFFF) | select.POLLIN << 32


_planes: weakref.WeakSet[Plane] = weakref.WeakSet()


def _disarm_in_child() -> None:
    for plane in list(_planes):
        plane.words[Ctx.REFUSE] = _FORKED
        if plane._connections is not None:
            with contextlib.suppress(Exception):
                plane._connections.close_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disarm_in_child)


def fast_arrays() -> bool:
    """Whether compiled code may read numpy's arrays by their objects' addresses in this process."""
    return fast.layout_ok()
