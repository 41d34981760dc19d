"""Two ways to pay less: a persistent handle for a call made many times, and calls that run while the program computes.

Run it:
    gfkernels run -n 2 examples/05_persistent_and_overlap.py
"""

import time

import numpy as np

import gfkernels as gf

comm = gf.init()
total = sum(range(1, comm.size + 1))


def seconds(call, times):
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


# A handle has checked the array and built the plan; each call only runs it.
small = gf.zeros(2)
reduce_small = gf.plan_allreduce(small)
small[:] = comm.rank + 1
reduce_small()
assert (small == total).all()
small[:] = 0
handle, plain = seconds(reduce_small, 2000), seconds(lambda: gf.allreduce(small), 2000)
if comm.rank == 0:
    print(f"8 bytes: {handle * 1e6:.1f} µs by the handle, {plain * 1e6:.1f} µs by a plain call")

# As in a backward pass: each layer's gradient travels while the next one is computed.
layers = [gf.empty(1 << 18) for _ in range(8)]
matrix = np.random.default_rng(0).standard_normal((300, 300)).astype("float32")
works = []
for layer in layers:
    layer[:] = comm.rank + 1
    works.append(gf.allreduce(layer, async_op=True))
    matrix = matrix @ matrix / 300  # the next layer's work; BLAS and the transfer both run without the interpreter
done = sum(work.done() for work in works)
for work, layer in zip(works, layers, strict=True):
    assert work.wait() is layer
    assert (layer == total).all()
if comm.rank == 0:
    print(f"{len(layers)} asynchronous calls, {done} of them over before anybody waited; all right")
