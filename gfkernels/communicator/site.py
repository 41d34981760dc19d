"""Owns what all communicators of a process's world share: its session, shared memory, and what may be reached how."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from gfkernels.bootstrap import Session, interface_addresses
from gfkernels.communicator.events import Events
from gfkernels.config import Config
from gfkernels.errors import ConnectError, UnavailableError
from gfkernels.trace import log
from gfkernels.transport.arena import Arena, Block
from gfkernels.transport.arena_peers import PeerArenas
from gfkernels.transport.verbs import device as _device

if TYPE_CHECKING:
    from gfkernels.transport.verbs.rail import Rail

# Imported before anything else registers what runs at exit, latest first: devices close when no communicator is left.
assert _device

_SITE_NBYTES: Final = 4096
_LEFT: Final = 0

_arena: Arena | None = None
_arena_lock = threading.Lock()


def process_arena(config: Config | None = None, n_local: int = 1) -> Arena:
    """This process's shareable memory, made at first use; a forked child gets one of its own."""
    global _arena
    with _arena_lock:
        if _arena is None or not _arena.owned or _arena.closed:
            _arena = Arena(None if config is None else config.arena_bytes, n_local=n_local)
        return _arena


@dataclass(eq=False)
class Site:
    """One process's place among the ranks of its world.

    Attributes:
        session: store, control connection, who runs where.
        config: the settings.
        arena: this process's shareable memory.
        events: news about peers.
        addresses: where each rank's arena is mapped here, by world rank; empty: the ranks do not share memory.
        remote_addresses: where that rank itself has it.
        whys: what was passed over, and why.
        cma_reason: why cross-memory attach cannot be used; "": it can.
        pids: by world rank, as seen here.
        rdma_hoped: whether all ranks' hosts have RDMA devices, or RDMA was asked for.
        elsewhere: addresses of other ranks' hosts.
        rails: the RDMA ports in use, or why there are none; None: not looked for.
    """

    session: Session
    config: Config
    arena: Arena
    events: Events
    addresses: list[int] = field(default_factory=list)
    remote_addresses: list[int] = field(default_factory=list)
    whys: list[str] = field(default_factory=list)
    cma_reason: str = "not looked for"
    pids: list[int] = field(default_factory=list)
    rdma_hoped: bool = False
    elsewhere: list[str] = field(default_factory=list)
    rails: list[Rail] | UnavailableError | None = None
    _peers: PeerArenas | None = None
    _block: Block | None = None
    _left_words: npt.NDArray[np.int64] | None = None
    _counter: int = 0

    @property
    def rank(self) -> int:
        """World rank."""
        return self.session.world.rank

    @property
    def size(self) -> int:
        """World size."""
        return self.session.world.size

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks map each other's arenas."""
        return bool(self.addresses)

    def exchange(self, value: Any, what: str = "site") -> list[Any]:
        """An all-gather of JSON among all ranks of the world, which call it in the same order."""
        self._counter += 1
        key = f"gfkernels/{what}/{self._counter}"
        return self.session.store.gather(key, self.rank, self.size, value, self.config.connect_timeout_s)

    def close(self) -> None:
        """Says that this rank leaves, and lets go of everything. Waits for nobody."""
        if self._left_words is not None:
            self._left_words[_LEFT] = 1
        self.session.close()
        self.events.close()
        if self._peers is not None:
            self._peers.close()
        if isinstance(self.rails, list):
            from gfkernels.transport.verbs.rail import close_rails

            close_rails(self.rails)
            self.rails = None
        self.addresses = []


def open_site(session: Session, config: Config) -> Site:
    """Finds out what this world's ranks can share. All ranks call it together.

    Raises:
        UnavailableError: the configured transport cannot be used here; says why and what would help.
    """
    hosts = session.hosts
    arena = process_arena(config, hosts.local_size)
    site = Site(session, config, arena, Events(session))
    if session.world.size == 1:
        return site
    if config.transport in ("tcp", "verbs"):
        site.whys.append(f"shared memory: transport={config.transport} was asked for")
    elif len(hosts.groups) > 1:
        _pass_over(site, "shm", f"the ranks run on {len(hosts.groups)} hosts")
    else:
        _share_memory(site)
    if site.shares_memory:
        _probe_cma(site)
    elif config.transport in ("auto", "verbs"):
        _hope_for_rdma(site)
    _watch_processes(site)
    return site


def _hope_for_rdma(site: Site) -> None:
    """Finds out whether trying is worth anything: whether all ranks see a device."""
    from gfkernels.transport.verbs import sysfs

    local = site.session.hosts.local_ranks
    addresses = [address for _, address in interface_addresses(site.config.interface)]
    told = site.exchange({"addresses": addresses, "cards": [card.name for card in sysfs.scan()]}, "rdma")
    others = [fact for rank, fact in enumerate(told) if rank not in local]
    site.elsewhere = [address for fact in others for address in fact["addresses"] if address not in addresses]
    without = [rank for rank, fact in enumerate(told) if not fact["cards"]]
    site.rdma_hoped = site.config.transport == "verbs" or not without
    if not site.rdma_hoped:
        site.whys.append(f"verbs: no RDMA device on the host of rank {without[0]}")
        log.info("verbs is not used: there is no RDMA device on the host of rank %d", without[0])


def _pass_over(site: Site, name: str, why: str) -> None:
    if site.config.transport in ("shm", "cma"):
        raise UnavailableError(
            f"transport={site.config.transport} was asked for, but {why}",
            'Use transport="tcp", or "auto" to take the best that works',
        )
    site.whys.append(f"{name}: {why}")
    log.info("%s is not used: %s", name, why)


def _share_memory(site: Site) -> None:
    session = site.session
    try:
        peers = PeerArenas(
            site.arena,
            lambda value: site.exchange(value, "arena"),
            secret=session.secret,
            index=site.rank,
            size=site.size,
            timeout_s=site.config.connect_timeout_s,
        )
    except ConnectError as error:
        _pass_over(site, "shm", str(error))
        return
    block = site.arena.allocate(_SITE_NBYTES)
    words: npt.NDArray[np.int64] = block.array((_SITE_NBYTES // 8,), np.int64)
    words[:] = 0
    told = site.exchange({"offset": block.offset, "address": site.arena.address}, "site")
    site._peers, site._block, site._left_words = peers, block, words
    site.addresses = list(peers.addresses)
    site.remote_addresses = [fact["address"] for fact in told]
    places = [peers.resolve(rank, fact["offset"], 8) for rank, fact in enumerate(told)]
    site.events.left_flags = {rank: place for rank, place in enumerate(places) if rank != site.rank}


def _probe_cma(site: Site) -> None:
    """Every rank reads and writes every other's memory once; it is used only where all of that works."""
    from gfkernels.transport import cma

    if site.config.transport == "shm":
        site.cma_reason = "transport=shm was asked for"
        return
    allowed, why_not = cma.allow_ptrace("off" if site.config.ptrace == "off" else "any")
    token = cma.make_token()
    told = site.exchange(
        {
            "pid": os.getpid(),
            "address": int(token.ctypes.data),
            "token": token[: cma.TOKEN_NBYTES].tobytes().hex(),
        },
        "cma",
    )
    site.pids = [fact["pid"] for fact in told]
    verdict = ""
    for rank, fact in enumerate(told):
        if rank != site.rank and not verdict:
            works, why = cma.probe(fact["pid"], fact["address"], token.nbytes, bytes.fromhex(fact["token"]))
            verdict = "" if works else f"rank {site.rank} to rank {rank}: {why}"
    if verdict and not allowed:
        verdict += f" ({why_not})"
    verdicts = [text for text in site.exchange(verdict, "cma") if text]
    del token  # the peers have written into it, and are done
    site.cma_reason = verdicts[0] if verdicts else ""
    if not verdicts:
        return
    if site.config.transport == "cma":
        raise UnavailableError(
            f"transport=cma was asked for, but cross-memory attach does not work here: {verdicts[0]}",
            'Use transport="shm" or "auto"; arrays from gfkernels.empty do not need it',
        )
    site.whys.append(f"cma: {verdicts[0]}")
    log.info("cross-memory attach is not used: %s. Ordinary arrays go through staging memory", verdicts[0])


def _watch_processes(site: Site) -> None:
    """Descriptors that become readable as peers' processes end, for those that can be named from here."""
    identities = site.session.hosts.identities
    own = identities[site.rank]
    if not hasattr(os, "pidfd_open") or not own.pid_ns:
        return
    for rank in site.session.hosts.local_ranks:
        if rank != site.rank and identities[rank].pid_ns == own.pid_ns:
            # A peer that has died since is noticed by its control connection.
            with contextlib.suppress(OSError):
                site.events.watch(rank, os.pidfd_open(identities[rank].pid))


class Graveyard:
    """Keeps what slow peers may still touch after this rank gave up on a call, until they say that they are out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[tuple[Callable[[], bool], Any]] = []

    def bury(self, is_safe: Callable[[], bool], things: Any) -> None:
        """Keeps `things` alive until `is_safe()` is true at some later `reap`."""
        with self._lock:
            self._entries.append((is_safe, things))

    def reap(self) -> int:
        """Lets go of what is safe; how many entries are left."""
        with self._lock:
            entries, self._entries = self._entries, []
        kept = [entry for entry in entries if not entry[0]()]
        with self._lock:
            self._entries += kept
            return len(self._entries)


graveyard: Final = Graveyard()
