"""float32 arrays that travel as float16: half the bytes over TCP, additions in fp32 all the same.

Run it:
    gfkernels run -n 2 examples/06_float16_on_the_wire.py
"""

import time

import numpy as np

import gfkernels as gf

comm = gf.init(transport="tcp")  # as between machines
gradients = [np.random.default_rng(rank).standard_normal(1 << 20).astype("float32") for rank in range(comm.size)]
exact = np.sum(gradients, axis=0, dtype="float64")
tolerance = np.sum(np.abs(gradients), axis=0)


def reduced(wire):
    x = gradients[comm.rank].copy()
    comm.barrier()
    start = time.perf_counter()
    gf.allreduce(x, wire=wire)
    return x, time.perf_counter() - start


for wire, unit in ((None, 2.0**-24), ("float16", 2.0**-11)):
    reduced(wire)  # the first call also makes its plan
    results = [reduced(wire) for _ in range(5)]
    x, seconds = results[0][0], sorted(time for _, time in results)[2]
    # What is rounded, is rounded on its way from rank to rank; every rank ends with the same bits.
    assert (np.abs(x - exact) <= 2 * comm.size * unit * tolerance).all()
    everyones = gf.allgather(x[:1000])
    assert (everyones.view("uint32") == everyones[0].view("uint32")).all()
    if comm.rank == 0:
        worst = float(np.max(np.abs(x - exact)))
        print(f"4 MiB travelling as {wire or 'float32'}: {seconds * 1e3:.2f} ms, largest error {worst:.1e}")
