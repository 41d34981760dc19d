"""Owns the runs of this folder's programs in guests: control path and compiled data path over real queue pairs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from guest import Guest

_HERE = Path(__file__).resolve().parent


def _run(guest: Guest, program: str, *arguments: str, timeout_s: float = 300) -> str:
    guest.precompile()
    output = guest.python(str(_HERE / program), *arguments, timeout_s=timeout_s).check()
    print(output)
    return output


def test_a_port_against_itself(guest: Guest) -> None:
    assert "compiled=True" in _run(guest, "guest_loopback.py")


def test_a_device(guest: Guest) -> None:
    _run(guest, "guest_device.py")


def test_ranks(guest: Guest) -> None:
    _run(guest, "guest_processes.py")


def test_faults(guest: Guest) -> None:
    _run(guest, "guest_faults.py")


@pytest.mark.parametrize("way", ["machine-code", "pyverbs"])
def test_conformance(guest: Guest, way: str) -> None:
    _run(guest, "guest_conformance.py", way, timeout_s=500)


def test_two_rails(guests: Any) -> None:
    (guest,) = guests.give(1, n_rails=2)
    _run(guest, "guest_processes.py", "two_rails")


def test_two_hosts(two_guests: tuple[Guest, Guest]) -> None:
    with ThreadPoolExecutor() as pool:
        said = list(pool.map(lambda one: _run(one, "guest_two_hosts.py"), two_guests))
    assert all("ok     over_the_wire" in text for text in said)
