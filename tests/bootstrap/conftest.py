"""Owns how these tests run ranks: forked processes whose result, error or death the test sees."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

_context = multiprocessing.get_context("fork")


class Rank:
    """One forked process that runs a function."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._receiver, sender = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_child, args=(sender, function, args), daemon=True)
        with warnings.catch_warnings():
            # Threads of other tests in this process do not matter to the child, which uses none of their state.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        sender.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def result(self, timeout: float = 20.0) -> Any:
        """What the function returned; raises what it raised."""
        if not self._receiver.poll(timeout):
            raise AssertionError(f"no result within {timeout} s")
        try:
            kind, value = self._receiver.recv()
        except EOFError:
            self._process.join(5)
            raise AssertionError(f"the process died with {self._process.exitcode}") from None
        if kind == "error":
            raise value
        return value

    def error(self, timeout: float = 20.0) -> Exception:
        """What the function raised."""
        try:
            value = self.result(timeout)
        except AssertionError:
            raise
        except Exception as error:
            return error
        raise AssertionError(f"no error but {value!r}")

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(5)
        self._process.close()
        self._receiver.close()


def _child(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        value = ("value", function(*args))
    except Exception as error:
        value = ("error", error)
    sender.send(value)
    sender.close()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Callable[..., Rank]]:
    """`start(function, *args)` runs a function as a rank; all are ended with the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in list(os.environ):
        if name.startswith(("GFKERNELS_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "SLURM_", "OMPI_", "PMI")):
            monkeypatch.delenv(name)
    ranks: list[Rank] = []

    def run(function: Callable[..., Any], *args: Any) -> Rank:
        ranks.append(Rank(function, args))
        return ranks[-1]

    yield run
    for rank in ranks:
        rank.end()


@pytest.fixture
def port() -> int:
    """A port with 16 free ones above it, below those that the kernel hands out."""
    while True:
        base = random.randrange(20_000, 30_000, 20)
        with suppress(OSError):
            for above in range(17):
                socket.create_server(("127.0.0.1", base + above)).close()
            return base


@pytest.fixture
def eventually() -> Callable[..., None]:
    """`eventually(condition, seconds)` waits until a condition holds."""

    def wait(condition: Callable[[], Any], seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.01)

    return wait
