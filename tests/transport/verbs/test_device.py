"""Opened devices over imitated pyverbs objects: shared, registered with, refused, and closed in order and once."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest
from fake_pyverbs import Card

from gfkernels.errors import UnavailableError, UsageError
from gfkernels.transport.verbs import device as module
from gfkernels.transport.verbs import memlock
from gfkernels.transport.verbs.device import open_device
from gfkernels.transport.verbs.events import describe, events


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """A card behind every device name."""
    card = Card()
    verbs = card.verbs()
    monkeypatch.setattr(module, "load", lambda: verbs)
    yield card
    assert not module._opened


_KEPT = np.zeros(1 << 16, np.uint8)


def _array(nbytes: int = 8192) -> tuple[int, int]:
    return int(_KEPT.ctypes.data), nbytes


def test_shared_in_the_process(card: Card) -> None:
    first, second = open_device("a"), open_device("a")
    other = open_device("b")
    assert first is second and other is not first
    first.close()
    assert card.closed == []
    second.close()
    assert card.closed == ["PD", "Context"]
    other.close()


def test_closed_in_order_whatever_was_forgotten(card: Card) -> None:
    device = open_device("a")
    device.register(*_array())
    cq = device.create_cq(10)
    module.Owned(device, device.verbs.QP(device.pd, _attributes()))
    device.register(*_array())
    cq_again = device.create_cq(10)
    cq.close()
    cq.close()
    assert not cq.is_open and cq_again.is_open
    device.close()
    assert card.closed == ["CQ", "QP", "CQ", "MR", "MR", "PD", "Context"]
    cq_again.close()


def _attributes() -> object:
    from fake_pyverbs import Bag

    return Bag(cap=Bag(max_inline_data=0))


def test_what_is_open_at_exit(card: Card) -> None:
    device = open_device("a")
    device.create_cq(10)
    module._close_all()
    assert card.closed == ["CQ", "PD", "Context"]


def test_registrations_are_found_by_compiled_code(card: Card) -> None:
    device = open_device("a")
    address, nbytes = _array()
    words = device.regions._words
    one = device.register(address, nbytes)
    assert words[:5].tolist() == [1, address, address + nbytes, 0x11, 0x22]
    assert (one.lkey, one.rkey) == (0x11, 0x22)
    hidden = device.register(*_array(), listed=False)
    assert words[0] == 1
    one.close()
    one.close()
    assert words[2] == 0 and card.closed == ["MR"]
    hidden.close()
    device.close()


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (errno.EFAULT, UsageError, "read-only, or not all of them are mapped"),
        (errno.ENOMEM, UnavailableError, "limit of locked memory"),
        (errno.EINVAL, UnavailableError, "room for 20"),
    ],
)
def test_refused_memory(card: Card, code: int, kind: type[Exception], text: str) -> None:
    device = open_device("a")
    card.fail["MR"] = code
    with pytest.raises(kind, match=text):
        device.register(*_array())
    device.close()


def test_what_is_not_mapped_is_not_a_question_of_limits(card: Card) -> None:
    device = open_device("a")
    card.fail["MR"] = errno.ENOMEM
    with pytest.raises(UsageError, match="not all of them are mapped"):
        device.register(4096, 4096)
    read_only = mmap.mmap(-1, 8192, prot=mmap.PROT_READ)
    card.fail["MR"] = errno.ENOMEM
    with pytest.raises(UsageError, match="read-only"):
        device.register(int(np.frombuffer(read_only, np.uint8).ctypes.data), 8192)
    device.close()


def test_memlock_is_checked_before(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memlock, "memlock", lambda: memlock.Memlock(4096, 0, False))
    device = open_device("a")
    with pytest.raises(UnavailableError, match="ulimit -l") as caught:
        device.register(*_array(8192))
    assert "LimitMEMLOCK" in caught.value.remedy
    device.close()


def test_a_queue_that_is_too_large(card: Card) -> None:
    device = open_device("a")
    with pytest.raises(UnavailableError, match="needs 1001 entries, and RDMA device a has at most 1000"):
        device.create_cq(1001)
    card.fail["CQ"] = errno.ENOMEM
    with pytest.raises(UnavailableError, match="made no completion queue"):
        device.create_cq(1000)
    device.close()


def test_a_device_that_cannot_be_opened(card: Card) -> None:
    card.fail["Context"] = errno.EACCES
    with pytest.raises(UnavailableError, match=r"cannot be opened.*uverbs"):
        open_device("a")
    card.fail["PD"] = errno.ENOMEM
    with pytest.raises(UnavailableError, match="cannot be used"):
        open_device("a")
    assert card.closed == ["Context"]


def test_a_forked_child_keeps_its_hands_off(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device("a")
    cq = device.create_cq(10)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: device.pid + 1)
        with pytest.raises(UsageError, match=f"opened by process {device.pid}"):
            device.register(*_array())
        cq.close()
        module._close_all()
        assert card.closed == []
    module._opened.clear()


def test_forks_are_warned_of_where_the_kernel_needs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card = Card()
    verbs = card.verbs(copies_on_fork=False)
    monkeypatch.setattr(module, "load", lambda: verbs)
    monkeypatch.setattr(module, "_warned", False)
    device = open_device("a")
    with caplog.at_level(logging.WARNING, "gfkernels"):
        device.register(1 << 20, 1 << 16)
        assert not caplog.records
        device.register((1 << 20) + 8, 100)
        device.register((1 << 20) + 8, 100)
    assert len(caplog.records) == 1 and "whole pages" in caplog.text
    device.close()


def test_events(card: Card) -> None:
    device = open_device("a")
    card.events[:] = [0, 10]
    assert list(events(device)) == []  # nothing says that reading would not block
    device.async_fd = 0
    assert [(event.kind, event.is_fatal) for event in events(device)] == [(0, True), (10, False)]
    assert list(events(device)) == []
    assert "RDMA device a: a port is down" in describe("a", 10).text and "event 77" in describe("a", 77).text
    device.close()
