"""How ranks find, recognise and watch each other: `discover` a world, `connect` it, use its store and control."""

from gfkernels.bootstrap.control import Control
from gfkernels.bootstrap.forks import close_in_child, forget
from gfkernels.bootstrap.hosts import HostIdentity, Hosts
from gfkernels.bootstrap.network import interface_addresses
from gfkernels.bootstrap.session import Session, connect
from gfkernels.bootstrap.store import Store, StoreTimeout
from gfkernels.bootstrap.world import StoreAddress, World, discover

__all__ = [
    "Control",
    "HostIdentity",
    "Hosts",
    "Session",
    "Store",
    "StoreAddress",
    "StoreTimeout",
    "World",
    "close_in_child",
    "connect",
    "discover",
    "forget",
    "interface_addresses",
]
