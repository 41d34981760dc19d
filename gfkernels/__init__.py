"""Collectives for the arrays of any framework, between processes and machines: pure Python to install, compiled to run.

`init` joins the ranks; `allreduce` and its relatives reduce and move arrays; `empty` gives memory that ranks share.
"""

from __future__ import annotations

from gfkernels._version import __version__
from gfkernels.api import (
    Registration,
    allgather,
    allreduce,
    allreduce_many,
    barrier,
    broadcast,
    default_communicator,
    empty,
    init,
    is_initialized,
    local_rank,
    local_size,
    plan_allreduce,
    rank,
    reduce_scatter,
    register,
    shutdown,
    size,
    unregister,
    zeros,
)
from gfkernels.communicator import Communicator, PersistentCall, Work
from gfkernels.config import Config
from gfkernels.errors import (
    BootstrapError,
    CommunicatorBroken,
    ConfigError,
    ConnectError,
    DeviceError,
    GfkernelsError,
    MismatchError,
    PeerLostError,
    TransportError,
    UnavailableError,
    UsageError,
    WaitTimeout,
)

__all__ = [
    "BootstrapError",
    "Communicator",
    "CommunicatorBroken",
    "Config",
    "ConfigError",
    "ConnectError",
    "DeviceError",
    "GfkernelsError",
    "MismatchError",
    "PeerLostError",
    "PersistentCall",
    "Registration",
    "TransportError",
    "UnavailableError",
    "UsageError",
    "WaitTimeout",
    "Work",
    "__version__",
    "allgather",
    "allreduce",
    "allreduce_many",
    "barrier",
    "broadcast",
    "default_communicator",
    "empty",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "plan_allreduce",
    "rank",
    "reduce_scatter",
    "register",
    "shutdown",
    "size",
    "unregister",
    "zeros",
]
