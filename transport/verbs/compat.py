"""Owns the way to pyverbs: imported when first needed, versions 44 and later alike, without what its import changes."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from gfkernels.errors import UnavailableError
from gfkernels.trace import log

HOW_TO_GET_PYVERBS: Final = (
    "Debian, Ubuntu: apt install python3-pyverbs; RHEL, Fedora: dnf install python3-pyverbs; it serves Pythons of the "
    "system's minor version. In a virtual environment of that version, put a folder on PYTHONPATH that holds a link "
    "to the system's pyverbs folder (Debian: /usr/lib/python3/dist-packages/pyverbs). For another Python, or in conda: "
    'pip install "cython<3.1" and then pip install --no-build-isolation pyverbs, beside a libibverbs of that version'
)
_FORK_UNNEEDED: Final = 2  # enum ibv_fork_status

_lock = threading.Lock()
_loaded: Pyverbs | None = None


@dataclass(frozen=True)
class Pyverbs:
    """The parts of pyverbs that we use, by their names there.

    Attributes:
        enums: the module of constants, whatever its name is in this version.
        Error: what the library's functions raise; has an `error_code`.
        DmaBufMR: None where this version does not know dma-buf.
        copies_on_fork: the kernel copies registered pages when a process forks, so that no child loses its view of a
            page that holds other things as well.
    """

    enums: Any
    Error: Any
    Context: Any
    PD: Any
    MR: Any
    DmaBufMR: Any
    CQ: Any
    QP: Any
    QPCap: Any
    QPInitAttr: Any
    QPAttr: Any
    AHAttr: Any
    GlobalRoute: Any
    GID: Any
    SGE: Any
    SendWR: Any
    RecvWR: Any
    copies_on_fork: bool

    @property
    def access(self) -> int:
        """What a card may do with memory, and a peer through it: write; reading is not among what we ask for."""
        return int(self.enums.IBV_ACCESS_LOCAL_WRITE | self.enums.IBV_ACCESS_REMOTE_WRITE)


def load() -> Pyverbs:
    """Imports pyverbs the first time, and prepares libibverbs for forks.

    Raises:
        UnavailableError: this is not Linux, or pyverbs is missing or does not fit; with the ways to get it.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _import()
        return _loaded


def _import() -> Pyverbs:
    if not sys.platform.startswith("linux"):
        raise UnavailableError(f"RDMA needs Linux, and this is {sys.platform}")
    try:
        with _root_logger_as_it_was():
            return _collect()
    except ImportError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        if isinstance(error, ModuleNotFoundError) and error.name == "pyverbs":
            reason = f"RDMA needs pyverbs, which Python {version} ({sys.executable}) does not find"
        else:
            reason = (
                f"pyverbs does not work with Python {version} ({sys.executable}): {error}. It was built for another "
                "Python, or for another libibverbs than this system's"
            )
        raise UnavailableError(reason, HOW_TO_GET_PYVERBS) from error


@contextmanager
def _root_logger_as_it_was() -> Iterator[None]:
    """pyverbs sets up the root logger when it is imported, which is the application's to do."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in [h for h in root.handlers if h not in handlers]:
            root.removeHandler(handler)


def _collect() -> Pyverbs:
    import pyverbs  # noqa: F401 — alone first: what is missing then is pyverbs itself
    from pyverbs import addr, cq, device, fork, mr, pd, pyverbs_error, qp, wr

    try:
        from pyverbs import libibverbs_enums as enums
    except ImportError:  # until 5x
        from pyverbs import enums
    return Pyverbs(
        enums=enums,
        Error=pyverbs_error.PyverbsError,
        Context=device.Context,
        PD=pd.PD,
        MR=mr.MR,
        DmaBufMR=getattr(mr, "DmaBufMR", None),
        CQ=cq.CQ,
        QP=qp.QP,
        QPCap=qp.QPCap,
        QPInitAttr=qp.QPInitAttr,
        QPAttr=qp.QPAttr,
        AHAttr=addr.AHAttr,
        GlobalRoute=addr.GlobalRoute,
        GID=addr.GID,
        SGE=wr.SGE,
        SendWR=wr.SendWR,
        RecvWR=wr.RecvWR,
        copies_on_fork=_prepare_forks(fork, pyverbs_error.PyverbsError),
    )


def _prepare_forks(fork: Any, error_class: type[Exception]) -> bool:
    """Before the first context of the process, as libibverbs wants it; whether the kernel needs no such help."""
    try:
        fork.fork_init()
    except error_class as error:
        log.warning(
            "RDMA: libibverbs could not prepare for forks (%s): something else in this process registered memory "
            "first. Child processes may lose memory that shares a page with what is registered",
            error,
        )
    return int(fork.is_fork_initialized()) == _FORK_UNNEEDED


def error_code(error: BaseException) -> int:
    """The errno in an exception of pyverbs; 0 where it has none."""
    code = getattr(error, "error_code", -1)
    return int(code) if isinstance(code, int) and code > 0 else 0


def version() -> str:
    """Version and place of pyverbs, for people.

    Raises:
        UnavailableError: see `load`.
    """
    load()
    import pyverbs

    try:
        number = metadata.version("pyverbs")
    except metadata.PackageNotFoundError:
        number = "of a distribution's package"
    return f"{number}, in {', '.join(pyverbs.__path__)}"
