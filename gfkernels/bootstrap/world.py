"""Owns which rank this process is: from arguments, from mpi4py, or from the variables of whatever launched it."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gfkernels.bootstrap.launchers import FAMILIES, Found, launcher_id, optional_integer
from gfkernels.bootstrap.slurm import found_by_slurm
from gfkernels.errors import ConfigError

_TRIES: Final = 16
_DERIVED_PORTS: Final = (20_000, 30_000)
"""Where a port is derived from a job id: below the kernel's ephemeral ports, so that these do not take it."""


@dataclass(frozen=True)
class StoreAddress:
    """Where rank 0's store listens. `exact`: on that port; else on one of the 16 above it, which stays torch's own."""

    host: str
    port: int
    exact: bool

    @property
    def ports(self) -> list[int]:
        """The ports that rank 0 tries in turn, and clients too."""
        return [self.port] if self.exact else [p for p in range(self.port + 1, self.port + 1 + _TRIES) if p < 65536]

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        ports = self.ports
        return f"{host}:{ports[0]}" if len(ports) == 1 else f"{host}:{ports[0]}…{ports[-1]}"


@dataclass(frozen=True)
class World:
    """This process's place among the ranks.

    Attributes:
        rank: 0 … size-1.
        size: number of ranks.
        local_rank: place among the ranks of this host; a claim of the launcher until `connect` has verified it.
        local_size: number of ranks on this host, likewise.
        store_address: where rank 0 listens; None for a single process and where an mpi4py communicator tells.
        source: who said so, for people: "arguments", "mpi4py", "torchrun", "Open MPI", …, "single process".
        single_host: all ranks are known to run on this host: loopback is enough.
        job_id: what tells this job from others on the same machine; may be empty.
        comm: the mpi4py communicator that the address and secret travel over, if any.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    store_address: StoreAddress | None
    source: str
    single_host: bool = True
    job_id: str = ""
    comm: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(f"{self.source}: rank {self.rank} of {self.size} ranks: a rank lies in 0 … size-1")


def discover(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    size: int | None = None,
    store: str | None = None,
    comm: Any = None,
    job_id: str | None = None,
) -> World:
    """Finds this process's place: arguments, else `comm`, else torchrun's, an MPI's, Slurm's variables, else alone.

    Args:
        environ: the environment's variables.
        rank: this process's rank; together with `size`.
        size: number of ranks.
        store: "host:port" of rank 0's store ("[::1]:29500" for IPv6). Without `rank` and `size` these come from the
            environment and only the address from here.
        comm: an mpi4py communicator.
        job_id: overrides what the launcher tells.

    Raises:
        ConfigError: variables are incomplete, contradict each other or are no numbers.
    """
    if (rank is None) != (size is None):
        given, lacking = ("rank", "size") if size is None else ("size", "rank")
        raise ConfigError(f"init({given}={rank if size is None else size}) also needs {lacking}=")
    address = parse_store(store) if store is not None else None
    if comm is not None:
        if rank is not None or store is not None:
            raise ConfigError("init(comm=…) takes rank, size and store from the communicator: leave those out")
        return world_of_comm(comm, job_id or "")
    if rank is not None and size is not None:
        found = Found("arguments", _argument("rank", rank), _argument("size", size), None, None, job_id or "")
    else:
        found = from_environment(environ)
    return _world(found, address, environ, job_id)


def from_environment(environ: Mapping[str, str]) -> Found:
    """What the launcher's variables say; a single process where there are none."""
    for family in FAMILIES:
        found = family(environ)
        if found is not None:
            return found
    return found_by_slurm(environ) or Found("single process", 0, 1, 0, 1, "")


def world_of_comm(comm: Any, job_id: str) -> World:
    """A world that is an mpi4py communicator's; the address is told over it in `connect`."""
    try:
        rank, size = int(comm.Get_rank()), int(comm.Get_size())
    except AttributeError:
        raise ConfigError(f"comm= takes an mpi4py communicator, not {type(comm).__name__}") from None
    return World(rank, size, rank, size, None, "mpi4py", False, job_id, comm)


def parse_store(text: str) -> StoreAddress:
    """Reads "host:port".

    Raises:
        ConfigError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f'store={text!r}: write an IPv6 address in brackets: "[{host}]:{port}"')
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f'store={text!r}: expected "host:port" with a port in 1 … 65535')
    return StoreAddress(host, int(port), exact=True)


def is_loopback(host: str) -> bool:
    """Whether a name or address means this host only."""
    if host in ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _argument(name: str, value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{name}={value!r}: expected an integer")
    return value.__index__()


def _world(found: Found, address: StoreAddress | None, environ: Mapping[str, str], job_id: str | None) -> World:
    job = job_id or environ.get("GFKERNELS_JOB_ID") or found.job_id
    if found.size == 1 and found.rank == 0:
        return World(0, 1, 0, 1, None, found.source, True, job)
    if found.local_size is not None and found.local_size > found.size:
        raise ConfigError(
            f"{found.source}: {found.local_size} ranks on this host, but {found.size} ranks in all: "
            "one of the two numbers is wrong"
        )
    if found.local_size is not None and found.local_rank is not None and not 0 <= found.local_rank < found.local_size:
        raise ConfigError(f"{found.source}: local rank {found.local_rank} of {found.local_size} ranks on this host")
    local = found.local_size == found.size
    if address is None:
        address = _address(found, local, environ)
        single = local or is_loopback(address.host)
    else:
        # An address that was given explicitly is meant: ranks in network namespaces of one host need it, too.
        single = is_loopback(address.host)
    if single and not is_loopback(address.host):
        address = StoreAddress("localhost", address.port, address.exact)
    local_rank = found.local_rank if found.local_rank is not None else (found.rank if single else 0)
    local_size = found.local_size if found.local_size is not None else (found.size if single else 1)
    return World(found.rank, found.size, local_rank, local_size, address, found.source, single, job)


def _address(found: Found, local: bool, environ: Mapping[str, str]) -> StoreAddress:
    host, port = environ.get("MASTER_ADDR", ""), optional_integer(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 65535:
        raise ConfigError(f"MASTER_PORT={port}: expected a port in 1 … 65534")
    if host and port is not None:
        return StoreAddress(host, port, exact=False)
    if found.source in ("arguments", "torchrun"):
        lacking = "MASTER_ADDR" if not host else "MASTER_PORT"
        what = f"rank={found.rank}, size={found.size}" if found.source == "arguments" else "RANK and WORLD_SIZE"
        remedy = 'pass store="host:port", or set MASTER_ADDR and MASTER_PORT'
        raise ConfigError(f"{what} are set but {lacking} is not, so nobody knows where rank 0 is: {remedy}")
    host = host or ("localhost" if local else found.first_host)
    if not host:
        raise ConfigError(
            f"{found.source} started {found.size} ranks on several hosts and its variables do not name the first: "
            "install mpi4py, or set MASTER_ADDR and MASTER_PORT"
        )
    job = found.job_id or launcher_id()
    low, high = _DERIVED_PORTS
    digest = hashlib.sha256(f"{found.source}/{job}".encode()).digest()
    derived = low + int.from_bytes(digest[:4], "big") % (high - low)
    return StoreAddress(host, derived if port is None else port, exact=False)
