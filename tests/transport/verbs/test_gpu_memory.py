"""Ways to GPU memory that are not there: each says why, and what would help."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_pyverbs import Card, FakeError

from gfkernels.errors import UnavailableError
from gfkernels.transport.verbs import device as device_module
from gfkernels.transport.verbs import gpu_memory
from gfkernels.transport.verbs.device import Device, open_device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """An opened device."""
    verbs = Card().verbs()
    monkeypatch.setattr(device_module, "load", lambda: verbs)
    device = open_device("a")
    yield device
    device.close()


def _answers(device: Device, code: int) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise FakeError("no", code)

    device.verbs = replace(device.verbs, DmaBufMR=refuse)


def test_an_old_pyverbs(device: Device, tmp_path: Path) -> None:
    ok, why = gpu_memory.probe_gpu_memory(device, root=tmp_path)
    assert not ok and "this pyverbs cannot" in why and "modprobe nvidia-peermem" in why


def test_an_old_kernel(device: Device, tmp_path: Path) -> None:
    _answers(device, errno.EOPNOTSUPP)
    ok, why = gpu_memory.probe_gpu_memory(device, root=tmp_path)
    assert not ok and "from Linux 5.12 on" in why


def test_no_driver(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(device, errno.EBADF)
    monkeypatch.setattr(gpu_memory, "_cuda", lambda: None)
    assert "no CUDA driver" in gpu_memory.probe_gpu_memory(device, root=tmp_path)[1]


class Driver:
    """As much of libcuda as is asked; `supported` None: the attribute is unknown."""

    def __init__(self, count: int, supported: int | None) -> None:
        self.count, self.supported = count, supported

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        if self.supported is None:
            return 1
        value._obj.value = self.supported
        return 0

    def cuMemGetHandleForAddressRange(self, *args: object) -> int:
        return 801


@pytest.mark.parametrize(
    ("count", "supported", "text"), [(0, 1, "finds no GPU"), (1, None, "too old"), (1, 0, "does not export memory")]
)
def test_a_driver_that_cannot(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, supported: int | None, text: str
) -> None:
    _answers(device, errno.EBADF)
    monkeypatch.setattr(gpu_memory, "_cuda", lambda: Driver(count, supported))
    assert text in gpu_memory.probe_gpu_memory(device, root=tmp_path)[1]


def test_what_works(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module" / "nvidia_peermem").mkdir(parents=True)
    ok, why = gpu_memory.probe_gpu_memory(device, root=tmp_path)
    assert ok and why.startswith("peermem")
    _answers(device, errno.EBADF)
    monkeypatch.setattr(gpu_memory, "_cuda", lambda: Driver(1, 1))
    assert gpu_memory.probe_gpu_memory(device, root=tmp_path) == (True, "dma-buf")


def test_registering_says_why_for_both(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(device, errno.EBADF)
    monkeypatch.setattr(gpu_memory, "_cuda", lambda: Driver(1, 1))
    monkeypatch.setattr(gpu_memory, "_probe_peermem", lambda root: "not loaded")
    with pytest.raises(UnavailableError, match=r"error 801\); peermem: not loaded"):
        gpu_memory.register_gpu_memory(device, 1 << 40, 4096)
    monkeypatch.setattr(gpu_memory, "_probe_peermem", lambda root: None)
    one, address = gpu_memory.register_gpu_memory(device, 1 << 40, 4096)
    assert address == 1 << 40 and device.regions._words[0] == 0
    one.close()
