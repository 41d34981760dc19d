"""Owns making a world's communicator: compile, meet, share what can be shared."""

from __future__ import annotations

from collections.abc import Callable

from gfkernels import engine, kernels
from gfkernels.bootstrap import World, connect
from gfkernels.communicator.communicator import Communicator
from gfkernels.communicator.site import graveyard, open_site
from gfkernels.config import Config
from gfkernels.trace import configure, log
from gfkernels.transport.verbs import sysfs


def _load_shared() -> None:
    # Their functions compile as they are imported, so only now, and under the lock.
    from gfkernels.transport import cma, shm  # noqa: F401


def _load_tcp() -> None:
    from gfkernels.transport import tcp  # noqa: F401

    _load_shared()


def load_all() -> None:
    """Imports all transports, whose functions compile as they are imported."""
    from gfkernels.transport.verbs import channels  # noqa: F401

    _load_tcp()


def _what_to_load(world: World, config: Config) -> tuple[str, Callable[[], None]]:
    if config.transport != "verbs" and config.transport != "tcp" and world.single_host:
        return "host", _load_shared
    if config.transport == "verbs" or (config.transport == "auto" and sysfs.scan()):
        return "rdma", load_all
    return "network", _load_tcp


def start(world: World, config: Config) -> Communicator:
    """Connects the ranks of a world. All of them call it.

    Raises:
        BootstrapError, ConfigError, ConnectError, UnavailableError: see `gfkernels.init`.
    """
    configure(config.log, world.rank)
    graveyard.reap()
    if world.size > 1:
        # Before the ranks meet: on a cold cache the others wait for the lock, not for the deadline of a call.
        engine.prepare(kernels.compile_lock, *_what_to_load(world, config))
    session = connect(world, config)
    try:
        site = open_site(session, config)
    except BaseException:
        session.close()
        raise
    try:
        members = tuple(range(site.size))
        comm = Communicator(site, "world", members, config, owns_site=True)
    except BaseException:
        site.close()
        raise
    log.info("rank %d of %d (%s) over %s", site.rank, site.size, world.source, comm.transport)
    return comm
