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


def test_collectives(guest: Guest) -> None:
    _run(guest, "guest_collectives.py", "two_ranks", "four_ranks", "through_pyverbs", "a_killed_peer", "a_mismatch")


def test_two_rails(guests: Any) -> None:
    (guest,) = guests.give(1, n_rails=2)
    _run(guest, "guest_processes.py", "two_rails")


def _run_on_both(guests: tuple[Guest, Guest], program: str, *arguments: str) -> list[str]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda one: _run(one, program, *arguments), guests))


def test_two_hosts(two_guests: tuple[Guest, Guest]) -> None:
    said = _run_on_both(two_guests, "guest_two_hosts.py")
    assert all("ok     over_the_wire" in text for text in said)


def test_collectives_of_two_hosts(two_guests: tuple[Guest, Guest]) -> None:
    said = _run_on_both(two_guests, "guest_collectives.py", "two_hosts")
    assert all("ok     two_hosts" in text for text in said)
