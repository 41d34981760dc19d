"""Owns what a rank runs before parallel tests: it fills the cache of compiled code, so that workers do not compile."""

from __future__ import annotations

import importlib

import numpy as np

import gfkernels as gf
from gfkernels.transport.verbs import channels  # noqa: F401 - compiles as it is imported, also where there is no card


def main() -> None:
    """Makes a communicator over every transport, and reduces on it."""
    importlib.import_module("gfkernels.transport.verbs.channels")  # compiled when imported, and needs no card for that
    for transport in ("tcp", "auto"):
        with gf.init(transport=transport) as comm:
            assert (comm.allreduce(np.ones(8, np.float32)) == comm.size).all()


if __name__ == "__main__":
    main()
