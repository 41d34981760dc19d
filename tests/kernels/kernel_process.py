"""Owns a process that runs every kernel on fixed data and prints digests, for tests of cache and targets."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent.parent


def digests(cache: Path, **environment: str) -> dict[str, Any]:
    """Runs `main` in a new process.

    Args:
        cache: its cache folder.
        **environment: further variables.

    Returns:
        `results`: digest of the outputs per variant; `compiled`: how many kernels LLVM had to make; `first_s`,
        `slowest_s`: seconds of the first and the slowest `combine`; `native_half`.
    """
    env = {**os.environ, **environment, "GFKERNELS_CACHE_DIR": str(cache)}
    env["PYTHONPATH"] = os.pathsep.join([str(_ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    """Runs all variants on data that depends on nothing but the variant."""
    from kernel_oracle import bits, cases, label, run, variants

    from gfkernels.kernels import combine, objects

    compiled = 0
    compile_object = objects.compile_object

    def counting(text: str) -> bytes:
        nonlocal compiled
        compiled += 1
        return compile_object(text)

    objects.compile_object = counting
    times, results = [], {}
    for variant in variants():
        start = time.perf_counter()
        address = combine(*variant)
        times.append(time.perf_counter() - start)
        digest = hashlib.sha256()
        for case in cases(variant, (5, 77)):
            for outputs in run(address, case):
                for output in outputs:
                    digest.update(bits(output).tobytes())
        results[label(variant)] = digest.hexdigest()
    print(
        json.dumps(
            {
                "results": results,
                "compiled": compiled,
                "first_s": times[0],
                "slowest_s": max(times),
                "native_half": objects.native_half(),
            }
        )
    )


if __name__ == "__main__":
    main()
