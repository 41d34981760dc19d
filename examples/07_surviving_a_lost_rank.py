"""A rank dies in the middle of the work; the others notice at once, regroup without it, and go on.

Run it:
    gfkernels run -n 3 examples/07_surviving_a_lost_rank.py
"""

import os
import time

import numpy as np

import gfkernels as gf

comm = gf.init()
rank, size = comm.rank, comm.size
victim = size - 1
x = np.ones(1000, "float32")
gf.allreduce(x)
assert (x == size).all()

if size > 1:
    if rank == victim:
        os._exit(0)  # no goodbye, as after a crash
    start = time.monotonic()
    try:
        gf.allreduce(x)
    except gf.PeerLostError as error:
        seconds, lost = time.monotonic() - start, error.rank
        print(f"rank {rank}: after {seconds * 1e3:.0f} ms: {error}")
    else:
        raise AssertionError("a call without all ranks cannot succeed")
    assert lost == victim
    # The failed call's array is undefined and the communicator broken: start over with the ranks that are left.
    gf.shutdown()
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"])
    comm = gf.init(rank=rank - (rank > lost), size=size - 1, store=f"{host}:{port + 50}")

x[:] = 1  # from the last checkpoint, say
gf.allreduce(x)
assert (x == comm.size).all()
if comm.rank == 0:
    print(f"{comm.size} of {size} ranks go on; the sum is {x[0]:g}")
