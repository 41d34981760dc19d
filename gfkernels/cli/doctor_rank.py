"""Owns the two ranks of the doctor's self-test, which reduce arrays in every way there is."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Final

import numpy as np

import gfkernels as gf

_COUNT: Final = 1 << 18


def reduce_in_all_ways() -> list[tuple[str, str, str, str]]:
    """Runs on every rank of the self-test: reduces arrays in all ways, and says how each went."""
    rows = []

    def reduce(name: str, x: Any, comm: gf.Communicator, how: str = "") -> None:
        total = sum(range(1, comm.size + 1))
        x[:] = comm.rank + 1
        handle = comm.plan_allreduce(x)
        handle()
        right = bool((x == total).all())
        x[:] = 0
        start = time.perf_counter()
        for _ in range(10):
            handle()
        seconds = (time.perf_counter() - start) / 10
        text = f"{x.nbytes >> 10} KiB in {seconds * 1e6:.0f} µs{how} (plan {handle.plan_name})"
        rows.append((name, "ok" if right else "fail", text if right else f"wrong result, plan {handle.plan_name}", ""))

    with gf.init() as comm:
        rows.append(("two ranks", "ok", f"met; allreduce over {comm.transport}", ""))
        for why in comm.passed_over:
            remedy = "Ordinary arrays go through staging memory, which is slower; gfkernels.empty avoids it"
            rows.append(("not used", "warn", why, remedy if why.startswith("cma") else ""))
        reduce("registered memory", gf.empty(_COUNT), comm)
        reduce("ordinary memory", np.empty(_COUNT, np.float32), comm)
    with gf.init(transport="tcp") as comm:
        reduce("TCP", np.empty(_COUNT, np.float32), comm)
    return rows


def main() -> int:
    """Entry of the ranks; rank 0 prints the findings as JSON."""
    try:
        rows = reduce_in_all_ways()
    except gf.GfkernelsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    if os.environ.get("RANK") == "0":
        print(json.dumps(rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
