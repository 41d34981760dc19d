"""Owns the comparison of RDMA collectives with rdma-core's own benchmarks, in one run on one machine.

    scripts/guest --precompile -- .venv/bin/python bench/rdma.py

Two ranks share a port. Every round measures everything once, so that what disturbs the machine disturbs all; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any, Final

import numpy as np

import gfkernels as gf

_RING: Final = "ring, registered, each way (MB/s)"
_PERFTEST: Final = "ib_write_bw -b, each way (MB/s)"
_LATENCY: Final = "allreduce of 8 bytes (us)"
_WRITE: Final = "ib_write_lat of 8 bytes, one way (us)"
_MIB: Final = 1.048576
"""perftest's MB are 2**20 bytes."""
_SEGMENTS: Final = "allreduce in 4 KiB segments (MB/s)"


def _perftest(program: str, device: str, gid: int, nbytes: int, n: int, *more: str) -> float:
    """One run of a perftest program against itself; the figure that it prints."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = [program, "-F", "-d", device, "-x", str(gid), "-s", str(nbytes), "-n", str(n), "-p", str(port), *more]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        deadline = time.monotonic() + 60
        while True:
            done = subprocess.run([*words, "127.0.0.1"], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
            if time.monotonic() > deadline:
                raise SystemExit(f"{program} failed: {done.stdout}{done.stderr}")
            time.sleep(0.3)
    return float(done.stdout.split()[-1])


def _rank(rank: int, n_rounds: int, nbytes: int, device: str, gid: int) -> None:
    """Both ranks take turns with the programs, which rank 0 starts."""
    rows: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        rows.setdefault(name, []).append(value)

    def join(path: str, store: int, **options: Any) -> gf.Communicator:
        return gf.init(rank=rank, size=2, store=f"127.0.0.1:{store}", secret="rdma benchmark", transport="verbs",
                       verbs_device=device, verbs_path=path, verbs_gid_index=gid, **options)  # fmt: skip

    def timed(handle: Any, comm: gf.Communicator, n: int) -> float:
        comm.barrier()
        start = time.perf_counter()
        for _ in range(n):
            handle()
        return (time.perf_counter() - start) / n

    for turn in range(n_rounds):
        with join("compiled", 5800) as comm:
            small, large = np.ones(2, np.float32), gf.empty(nbytes // 4)
            large[:] = 1
            handle, big = comm.plan_allreduce(small), comm.plan_allreduce(large)
            for warm in (handle, big):
                warm()
            note(_LATENCY, 1e6 * timed(handle, comm, 300))
            note(_RING, nbytes / 1e6 / timed(big, comm, 3))
            comm.barrier()
            if rank == 0:
                both = _perftest("ib_write_bw", device, gid, 65536, 100, "-b", "--output=bandwidth")
                note(_PERFTEST, both / 2 * _MIB)
                note(_WRITE, _perftest("ib_write_lat", device, gid, 8, 1000, "--output=latency"))
            comm.barrier()
        for path in ("compiled", "pyverbs"):
            with join(path, 5800, segment_bytes=4096, plan="ring") as comm:
                medium, small = gf.empty(1 << 16), np.ones(2, np.float32)
                medium[:] = 1
                handle = comm.plan_allreduce(medium)
                handle()
                note(f"{_SEGMENTS}, {path}", medium.nbytes / 1e6 / timed(handle, comm, 3))
            with join(path, 5800) as comm:
                handle = comm.plan_allreduce(small)
                handle()
                note(f"{_LATENCY}, {path}", 1e6 * timed(handle, comm, 200))
        if rank == 0:
            print(f"round {turn + 1} of {n_rounds}", file=sys.stderr, flush=True)
    if rank == 0:
        _show({name: statistics.median(values) for name, values in rows.items()}, rows)


def _show(medians: dict[str, float], rows: dict[str, list[float]]) -> None:
    for name, value in medians.items():
        print(f"{name:55} {value:10.2f}   ({', '.join(f'{one:.2f}' for one in rows[name])})")
    ratios = {
        "ring over ib_write_bw, each way": medians[_RING] / medians[_PERFTEST],
        "8 bytes over ib_write_lat": medians[_LATENCY] / medians[_WRITE],
        "compiled over pyverbs, 4 KiB segments": medians[f"{_SEGMENTS}, compiled"] / medians[f"{_SEGMENTS}, pyverbs"],
        "compiled over pyverbs, 8 bytes": medians[f"{_LATENCY}, pyverbs"] / medians[f"{_LATENCY}, compiled"],
    }
    for name, value in ratios.items():
        print(f"{name:55} {value:10.2f}")
    print(json.dumps({"medians": medians, "ratios": ratios}))


def main() -> None:
    """Forks the two ranks once all code is loaded."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nbytes", type=int, default=4 << 20, help="of the large arrays (default: %(default)s)")
    parser.add_argument("--device", default="rxe0")
    parser.add_argument("--gid-index", type=int, default=1)
    options = parser.parse_args()
    pid = os.fork()
    _rank(0 if pid else 1, options.rounds, options.nbytes, options.device, options.gid_index)
    if pid:
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
