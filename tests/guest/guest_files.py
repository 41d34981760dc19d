"""Owns where the guest's files lie: one folder in the user's cache, and locks in it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent
"""The checkout."""


class GuestError(RuntimeError):
    """No guest can be had, or it failed; the text says why, and what to do."""


def folder() -> Path:
    """`$GFTEST_GUEST_DIR`, or gfkernels-guest in the user's cache; made where it is missing."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(os.environ.get("GFTEST_GUEST_DIR") or os.path.join(base, "gfkernels-guest")).absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@contextmanager
def lock(name: str, *, timeout_s: float = 600) -> Iterator[None]:
    """Holds a lock of the guest folder, which ends with this process at the latest.

    Raises:
        GuestError: somebody else held it all the time.
    """
    handle = take_lock(name, timeout_s=timeout_s)
    try:
        yield
    finally:
        os.close(handle)


def take_lock(name: str, *, timeout_s: float) -> int:
    """Takes a lock of the guest folder: an open file that holds it until it is closed. Raises as `lock` does."""
    handle = os.open(folder() / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise GuestError(f"another process held {folder() / name}.lock for {timeout_s} s") from None
            time.sleep(0.1)
    except BaseException:
        os.close(handle)
        raise


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
