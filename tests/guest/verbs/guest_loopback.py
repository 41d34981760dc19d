"""In the guest: a port against itself, by machine code and through pyverbs."""

from __future__ import annotations

import sys
import time

from gfkernels.transport.verbs.loopback import loopback_check


def main() -> int:
    """0 where it works."""
    start = time.monotonic()
    result = loopback_check()
    print(f"{result} in {time.monotonic() - start:.1f} s")
    assert result.ok and result.compiled and result.port == "rxe0:1", result
    return 0


if __name__ == "__main__":
    sys.exit(main())
