"""A group of ranks as users see it, and how calls run, fail and end on it."""

from __future__ import annotations

from gfkernels.communicator.communicator import Communicator
from gfkernels.communicator.persistent import PersistentCall
from gfkernels.communicator.start import start
from gfkernels.communicator.work import Work

__all__ = ["Communicator", "PersistentCall", "Work", "start"]
