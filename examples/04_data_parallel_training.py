"""A training loop of one's own: linear regression, every rank on its part of the data, gradients averaged.

Run it:
    gfkernels run -n 4 examples/04_data_parallel_training.py
"""

import numpy as np

import gfkernels as gf

SAMPLES, FEATURES, STEPS, RATE = 4000, 50, 60, 0.2

comm = gf.init()
random = np.random.default_rng(7)
truth = random.standard_normal(FEATURES).astype("float32")
inputs = random.standard_normal((SAMPLES, FEATURES)).astype("float32")
targets = inputs @ truth + 0.01 * random.standard_normal(SAMPLES).astype("float32")
mine = slice(comm.rank, None, comm.size)  # every rank takes its samples
inputs, targets = inputs[mine], targets[mine]

# Rank 0's start is everybody's; the gradient lies in memory that the ranks share, so that reducing it copies nothing.
weights = np.random.default_rng().standard_normal(FEATURES).astype("float32")
gf.broadcast(weights)
gradient = gf.empty(FEATURES)
losses = []
for step in range(STEPS):
    error = inputs @ weights - targets
    gradient[:] = 2 / len(targets) * (inputs.T @ error)
    gf.allreduce(gradient, "mean")
    weights -= RATE * gradient
    losses.append(float(gf.allreduce(np.array([np.mean(error**2)]), "mean")[0]))
    if comm.rank == 0 and step % 20 == 0:
        print(f"step {step:2}: loss {losses[-1]:.6f}")

assert losses[-1] < losses[0] / 1000, "training did not converge"
assert np.abs(weights - truth).max() < 0.05
# The averaged gradient has the same bits on all ranks, so the weights never drift apart.
everyones = gf.allgather(weights)
assert (everyones.view("uint32") == weights.view("uint32")).all()
if comm.rank == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.6f}; weights equal to the bit on {comm.size} ranks")
