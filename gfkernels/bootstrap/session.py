"""Owns bringing a world together: the secret, rank 0's server, the two connections of each rank, who runs where."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gfkernels.bootstrap import mpi
from gfkernels.bootstrap.control import Control, LocalControl, TcpControl
from gfkernels.bootstrap.dial import Identity, dial
from gfkernels.bootstrap.frames import session_key
from gfkernels.bootstrap.hosts import HostIdentity, Hosts, boot_id, group_hosts, this_host
from gfkernels.bootstrap.network import Endpoint, interface_addresses, listen, resolve
from gfkernels.bootstrap.secret import find_secret, given_secret
from gfkernels.bootstrap.server import StoreServer
from gfkernels.bootstrap.store import LocalStore, Store, StoreTimeout, TcpStore
from gfkernels.bootstrap.world import World, is_loopback
from gfkernels.config import Config
from gfkernels.errors import BootstrapError, PeerLostError
from gfkernels.trace import log

_LOOPBACK: Final = ("127.0.0.1", "::1")
_HOSTS_KEY: Final = "gfkernels/hosts"

_generations: dict[str, int] = {}
_lock = threading.Lock()
_open: weakref.WeakSet[Session] = weakref.WeakSet()


@dataclass(eq=False)
class Session:
    """A connected world.

    Attributes:
        world: with `local_rank`, `local_size` and `single_host` as found, not as claimed.
        store: keys, gathers and barriers among the ranks.
        control: events: who died, left, aborted.
        secret: 32 bytes that only this session's ranks know, for authenticating data connections.
        job_id: names this session among others; not secret.
        hosts: where the ranks run.
        server: in rank 0, what the others are connected to.
    """

    world: World
    store: Store
    control: Control
    secret: bytes
    job_id: str
    hosts: Hosts
    server: StoreServer | None = None

    def close(self) -> None:
        """Says goodbye and closes everything, waiting for nobody; more than once does nothing.

        When rank 0 closes, the others see it as left, and the store and control events end for all.
        """
        _open.discard(self)
        if self.server is not None:
            self.server.close()
        with contextlib.suppress(OSError):
            self.control.goodbye()
        self.control.close()
        self.store.close()


def connect(world: World, config: Config, deadline: float | None = None) -> Session:
    """Connects this rank with all others. Ranks may come in any order.

    Args:
        world: from `discover`.
        config: the settings.
        deadline: on the monotonic clock; None: `config.connect_timeout_s` from now.

    Raises:
        BootstrapError: ranks are missing by the deadline (named), do not accept each other, or a port is in use.
        ConfigError: several hosts and no secret.
    """
    if deadline is None:
        deadline = time.monotonic() + config.connect_timeout_s
    if world.size == 1:
        hosts = group_hosts(0, [this_host()])
        alone = replace(world, local_rank=0, local_size=1, single_host=True)
        key = secrets.token_bytes(32)
        return Session(alone, LocalStore(), LocalControl(), key, world.job_id or secrets.token_hex(8), hosts)
    meeting = _meet(world, config)
    cleanup: list[Callable[[], None]] = []
    try:
        session = _join(world, config, meeting, deadline, cleanup)
    except BaseException:
        for close in cleanup:
            close()
        if meeting.listener is not None:
            meeting.listener.close()
        raise
    with _lock:
        _generations[meeting.base] = meeting.generation + 1
    _open.add(session)
    return session


@atexit.register
def _close_all() -> None:
    # A daemon thread ends with the interpreter, and answers that rank 0 still owes the others would be lost with it.
    for session in list(_open):
        session.close()


@dataclass
class _Meeting:
    """Where and as whom the ranks meet."""

    base: str
    generation: int
    secret: bytes
    where: str
    endpoints: Callable[[], Sequence[Endpoint]]
    listener: socket.socket | None

    @property
    def job(self) -> str:
        return f"{self.base}#{self.generation}"


def _meet(world: World, config: Config) -> _Meeting:
    comm = mpi.communicator_of(world)
    if comm is not None:
        return _meet_by_mpi(world, config, comm)
    address = world.store_address
    assert address is not None
    # The port is part of the name: launchers without a job id still give every job its own port. What does not fit
    # into a greeting is hashed.
    base = f"{world.job_id}@{address.port}"
    base = base if len(base) <= 128 else hashlib.sha256(base.encode()).hexdigest()
    secret = find_secret(config, world.single_host, os.environ.get("XDG_RUNTIME_DIR"))
    ports = address.ports
    loopback = [address.host, *_LOOPBACK]
    if world.single_host and config.bind_address is not None:
        loopback.insert(0, config.bind_address)

    def endpoints() -> list[Endpoint]:
        hosts = loopback if world.single_host else [address.host]
        found = [endpoint for port in ports for host in hosts for endpoint in resolve(host, port)]
        return list(dict.fromkeys(found))

    listener = None
    if world.rank == 0:
        if config.bind_address is not None:
            names = [config.bind_address]
        elif world.single_host:
            names = [address.host] if address.exact else loopback
        else:
            names = [address.host] if address.exact else [""]
        listener = listen(names, ports)
    with _lock:
        generation = _generations.get(base, 0)
    return _Meeting(base, generation, secret, str(address), endpoints, listener)


def _meet_by_mpi(world: World, config: Config, comm: Any) -> _Meeting:
    single_host = mpi.all_equal(comm, boot_id())
    listener = None
    payload: dict[str, Any] | None = None
    if world.rank == 0:
        try:
            names = [config.bind_address] if config.bind_address else ([*_LOOPBACK] if single_host else [""])
            listener = listen(names, [0])
            port = listener.getsockname()[1]
            given = given_secret(config)
            payload = {
                "hosts": _reachable(config, listener, single_host),
                "port": port,
                "secret": (given or secrets.token_bytes(32)).hex(),
                "job": f"{world.job_id or 'mpi'}-{secrets.token_hex(8)}",
            }
        except Exception as error:
            # The others wait in the broadcast: they must hear of it before we raise.
            payload = {"error": f"rank 0: {error}"}
    try:
        told = mpi.broadcast(comm, payload)
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    hosts, port = [str(host) for host in told["hosts"]], int(told["port"])
    found = [endpoint for host in hosts for endpoint in resolve(host, port)]
    where = f"port {port} of {', '.join(hosts)}"
    return _Meeting(str(told["job"]), 0, bytes.fromhex(told["secret"]), where, lambda: found, listener)


def _reachable(config: Config, listener: socket.socket, single_host: bool) -> list[str]:
    bound = str(listener.getsockname()[0])
    if single_host or is_loopback(bound) or bound not in ("::", "0.0.0.0"):
        return [bound]
    addresses = [address for _, address in interface_addresses(config.interface)]
    return addresses or [socket.gethostname()]


def _join(
    world: World, config: Config, meeting: _Meeting, deadline: float, cleanup: list[Callable[[], None]]
) -> Session:
    server: StoreServer | None = None
    if meeting.listener is not None:
        server = StoreServer([meeting.listener], meeting.job, meeting.secret, world.size)
        cleanup.append(server.close)
        store_sock, control_sock = server.adopt(0, "store"), server.adopt(0, "control")
        name = server.session
        server.start()
        log.info("rank 0 serves job %s at %s", meeting.job, Endpoint(0, meeting.listener.getsockname()))
    else:
        identity = Identity(meeting.job, meeting.secret, world.rank, world.size)
        store_sock, greeting, endpoint = dial(meeting.endpoints, meeting.where, identity, "store", deadline)
        cleanup.append(store_sock.close)
        control_sock, again, _ = dial(lambda: [endpoint], str(endpoint), identity, "control", deadline)
        cleanup.append(control_sock.close)
        if again.session != greeting.session:
            raise BootstrapError(f"rank 0 at {endpoint} was restarted while rank {world.rank} connected: start again")
        name = greeting.session
    store = TcpStore(store_sock, world.rank, world.size, config.timeout_s)
    control = TcpControl(control_sock, world.rank)
    cleanup += [control.close, store.close]
    hosts = _gather_hosts(world, store, server, deadline)
    found = replace(world, local_rank=hosts.local_rank, local_size=hosts.local_size, single_host=len(hosts.groups) == 1)
    if world.single_host and not found.single_host:
        log.warning("the launcher said that all ranks share a host, but they run on %d kernels", len(hosts.groups))
    key = session_key(meeting.secret, meeting.job, name)
    return Session(found, store, control, key, f"{meeting.job}/{name}", hosts, server)


def _gather_hosts(world: World, store: TcpStore, server: StoreServer | None, deadline: float) -> Hosts:
    left = max(0.1, deadline - time.monotonic())
    try:
        messages = store.gather(_HOSTS_KEY, world.rank, world.size, this_host().message(), left)
    except StoreTimeout as error:
        raise BootstrapError(_incomplete(world, error.missing, server)) from None
    except PeerLostError as error:
        refused = f" ({'; '.join(server.refusals)})" if server is not None and server.refusals else ""
        raise BootstrapError(f"rank {world.rank} of {world.size} could not start: {error}{refused}") from None
    return group_hosts(world.rank, [HostIdentity.parse(message) for message in messages])


def _incomplete(world: World, missing: Sequence[int], server: StoreServer | None) -> str:
    ranks = ", ".join(map(str, missing)) or "unknown"
    text = (
        f"{len(missing)} of {world.size} ranks did not appear in time: missing rank{'s' * (len(missing) != 1)} {ranks}"
    )
    if server is not None and server.refusals:
        text += f"; refused: {'; '.join(server.refusals)}"
    return f"{text}. Were all started, and with the same address, job id and secret? (connect_timeout_s sets the time)"
