"""Owns the guests that tests share: few boots, one set of guests at a time on this machine, none left over.

A test asks for `guest`, `two_guests`, or for other ones with `guests.give`. They stay for the tests that come next, in
whatever file of this folder. A test may kill them: the next one gets new ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE))

import guest as guest_module  # noqa: E402
import guest_files  # noqa: E402
import guest_setup  # noqa: E402

_TIMEOUT_S = 900
"""Includes waiting until another worker's guests are gone."""
_FIXTURES = ("guest", "two_guests", "guests")


class Guests:
    """At most one guest, or one pair, at a time, whichever process of this machine runs the tests.

    Emulators take all cores and gigabytes of memory. A worker that waits here leaves its core to the other's guests.
    """

    def __init__(self) -> None:
        self._kind: Any = None
        self._booted: tuple[guest_module.Guest, ...] = ()
        self._stack = ExitStack()

    def give(self, n: int = 1, **options: Any) -> tuple[guest_module.Guest, ...]:
        """`n` guests (1 or 2) with these options of `Guest` or `booted_pair`; booted, unless the last test had them."""
        if reason := guest_setup.unavailable():
            pytest.skip(reason)
        kind = (n, sorted(options.items()))
        if kind != self._kind or not all(booted.alive for booted in self._booted):
            self.close()
            self._stack.callback(os.close, guest_files.take_lock("tests", timeout_s=_TIMEOUT_S))
            if n == 1:
                self._booted = (self._stack.enter_context(guest_module.Guest(**options)),)
            else:
                self._booted = self._stack.enter_context(guest_module.booted_pair(**options))
            self._kind = kind
        return self._booted

    def close(self) -> None:
        """Switches them off."""
        self._kind, self._booted = None, ()
        self._stack.close()


_guests = Guests()


@pytest.fixture
def guests() -> Guests:
    """For guests with options of their own."""
    return _guests


@pytest.fixture
def guest() -> guest_module.Guest:
    """A guest with two cores and rxe0, not connected to anything."""
    (booted,) = _guests.give()
    return booted


@pytest.fixture
def two_guests() -> tuple[guest_module.Guest, ...]:
    """Two guests with one core each on one wire: 10.77.0.1 and 10.77.0.2."""
    return _guests.give(2)


def _rank(item: pytest.Item) -> int:
    used = [number for number, name in enumerate(_FIXTURES, 1) if name in getattr(item, "fixturenames", ())]
    return max(used, default=0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what boots guests, and puts tests with the same kind of guest next to each other."""
    places = [number for number, item in enumerate(items) if _HERE in item.path.parents]
    for place, item in zip(places, sorted((items[place] for place in places), key=_rank), strict=True):
        items[place] = item
        if _rank(item):
            for mark in (pytest.mark.guest, pytest.mark.slow, pytest.mark.timeout(_TIMEOUT_S)):
                item.add_marker(mark, append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Gives the guests up as soon as this worker goes on to other tests."""
    try:
        yield
    finally:
        if nextitem is None or not _rank(nextitem):
            _guests.close()


def pytest_sessionfinish() -> None:
    """Also after Ctrl-C, which skips what comes after a test."""
    _guests.close()
