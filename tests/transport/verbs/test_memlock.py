"""The limit of locked memory: when it is too small, for whom it counts, and what is said."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from gfkernels.transport.verbs.memlock import REMEDY, Memlock, memlock


def test_within_the_limit() -> None:
    assert Memlock(8 << 20, 0, False).shortage(8 << 20) is None
    assert Memlock(None, 1 << 40, False).shortage(1 << 40) is None


def test_over_the_limit() -> None:
    text = Memlock(8 << 20, 4096, False).shortage(8 << 20)
    assert text is not None
    for part in ("8,388,608 bytes are to be", "4,096 are already pinned", "ulimit -l", "is 8,388,608 bytes"):
        assert part in text
    for part in ("limits.d", "LimitMEMLOCK=infinity", "Slurm", "--ulimit memlock=-1"):
        assert part in REMEDY


def test_root_is_exempt() -> None:
    assert Memlock(65536, 0, True).shortage(1 << 30) is None


@pytest.mark.parametrize(("capabilities", "exempt"), [("000001ffffffffff", True), ("0000000000000000", False)])
def test_what_the_kernel_says(tmp_path: Path, capabilities: str, exempt: bool) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tx\nVmLck:\t       8 kB\nVmPin:\t      12 kB\nCapEff:\t{capabilities}\n")
    found = memlock(status)
    assert (found.pinned_nbytes, found.exempt) == (12 * 1024, exempt)


def test_limit_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 1 << 20))
    assert memlock().limit_nbytes == 65536
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert memlock().limit_nbytes is None
    assert memlock(Path("/nonexistent")).exempt is False
