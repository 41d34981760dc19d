"""In the guest: a port against itself, by machine code and through pyverbs, and nothing left open afterwards."""

from __future__ import annotations

import sys

from guest_rig import descriptors, main

from gfkernels.transport.verbs.loopback import loopback_check
from gfkernels.transport.verbs.settings import Settings


def by_machine_code() -> None:
    """The pointers are found."""
    result = loopback_check()
    print(result)
    assert result.ok and result.compiled and result.port == "rxe0:1", result


def through_pyverbs() -> None:
    """As asked for."""
    result = loopback_check("rxe0:1", settings=Settings(reference=True))
    print(result)
    assert result.ok and not result.compiled, result


def nothing_stays_open() -> None:
    """Neither descriptors nor objects."""
    before = descriptors()
    for _ in range(3):
        assert loopback_check().ok
    assert descriptors() == before, (before, descriptors())


def no_such_device() -> None:
    """The error names what there is."""
    result = loopback_check("mlx5_9")
    assert not result.ok and "rxe0:1 ACTIVE Ethernet" in result.reason, result
    print(result.reason)


if __name__ == "__main__":
    sys.exit(main(by_machine_code, through_pyverbs, nothing_stays_open, no_such_device))
