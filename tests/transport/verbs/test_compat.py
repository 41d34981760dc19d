"""Importing pyverbs: missing, broken, of either kind of version, and what it must not change."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gfkernels.errors import UnavailableError
from gfkernels.transport.verbs import compat

_MODULES = {
    "addr": ("AHAttr", "GlobalRoute", "GID"),
    "cq": ("CQ",),
    "device": ("Context",),
    "mr": ("MR",),
    "pd": ("PD",),
    "qp": ("QP", "QPCap", "QPInitAttr", "QPAttr"),
    "wr": ("SGE", "SendWR", "RecvWR"),
    "pyverbs_error": ("PyverbsError",),
}
_BASE = "import logging\nlogging.basicConfig(level=logging.INFO)\n"
_FORK = "def fork_init():\n    {init}\ndef is_fork_initialized():\n    return {status}\n"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of pyverbs is imported before a test, or after it."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
            del sys.modules[name]

    forget()
    monkeypatch.setattr(compat, "_loaded", None)
    yield
    forget()


def _package(folder: Path, enums: str, status: int = 2, init: str = "pass") -> None:
    package = folder / "pyverbs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, classes in _MODULES.items():
        base = "Exception" if name == "pyverbs_error" else "object"
        text = _BASE + "".join(f"class {one}({base}):\n    pass\n" for one in classes)
        (package / f"{name}.py").write_text(text)
    (package / "fork.py").write_text(
        "from pyverbs.pyverbs_error import PyverbsError\n" + _FORK.format(init=init, status=status)
    )
    (package / f"{enums}.py").write_text("IBV_QPT_RC = 2\n")


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(UnavailableError) as caught:
        compat.load()
    assert "does not find" in caught.value.reason and sys.executable in caught.value.reason
    for part in ("apt install python3-pyverbs", "dnf install python3-pyverbs", "conda"):
        assert part in caught.value.remedy


def test_built_for_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(tmp_path, "enums")
    (tmp_path / "pyverbs" / "cq.py").write_text("raise ImportError('libibverbs.so.1: version IBVERBS_1.15 not found')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnavailableError, match=r"IBVERBS_1\.15 not found\. It was built for another"):
        compat.load()


@pytest.mark.parametrize("enums", ["enums", "libibverbs_enums"])
def test_both_kinds_of_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enums: str) -> None:
    _package(tmp_path, enums)
    monkeypatch.syspath_prepend(str(tmp_path))
    verbs = compat.load()
    assert verbs.enums.IBV_QPT_RC == 2 and verbs.copies_on_fork and compat.load() is verbs


def test_the_root_logger_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(tmp_path, "enums")
    monkeypatch.syspath_prepend(str(tmp_path))
    root = logging.getLogger()
    kept = list(root.handlers)
    root.handlers[:] = []  # basicConfig does nothing where there is one, such as pytest's
    level = root.level
    try:
        compat.load()
        assert (root.level, root.handlers) == (level, [])
    finally:
        root.handlers[:] = kept


@pytest.mark.parametrize(("status", "copies"), [(1, False), (2, True)])
def test_whether_the_kernel_copies_on_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, copies: bool
) -> None:
    _package(tmp_path, "enums", status)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert compat.load().copies_on_fork is copies


def test_too_late_for_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    _package(tmp_path, "enums", 0, "raise PyverbsError('Failed to init fork support')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING, "gfkernels"):
        assert not compat.load().copies_on_fork
    assert "registered memory first" in caplog.text


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnavailableError, match="needs Linux, and this is darwin"):
        compat.load()


def test_error_codes() -> None:
    class Failure(Exception):
        error_code = 12

    assert compat.error_code(Failure()) == 12
    assert compat.error_code(ValueError()) == 0
