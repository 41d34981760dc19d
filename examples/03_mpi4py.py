"""Under an MPI launcher, beside mpi4py: the ranks are MPI's, and its broadcast tells them where to meet.

Run it:
    mpiexec -n 2 python examples/03_mpi4py.py
"""

import numpy as np
from mpi4py import MPI

import gfkernels as gf

world = MPI.COMM_WORLD
comm = gf.init(comm=world)
assert (comm.rank, comm.size) == (world.rank, world.size)

random = np.random.default_rng(world.rank)
x = random.integers(-100, 100, 100_000).astype("int32")
expected = np.empty_like(x)
world.Allreduce(x, expected)

gf.allreduce(x)
assert (x == expected).all()
if comm.rank == 0:
    print(f"gfkernels and MPI agree on {x.size} sums over {comm.size} ranks")
