"""Owns the commands of a guest as the host sees them: running, and finished."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from guest_files import GuestError

_LOOK_S = 0.2


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    """Its exit code, or minus the signal that ended it."""
    output: str
    """Standard output and error, as they came."""
    timed_out: bool = False

    def check(self) -> str:
        """The output of a command that must have succeeded.

        Raises:
            AssertionError: it failed, or took too long.
        """
        assert self.code == 0, f"{'timed out, ' if self.timed_out else ''}code {self.code}:\n{self.output}"
        return self.output


class _Owner(Protocol):
    ident: int

    def stop_command(self, number: int) -> None: ...


class Running:
    """A command under way."""

    def __init__(self, guest: _Owner, number: int, output: Path, patience_s: float) -> None:
        self._guest, self._number, self._path, self._patience_s = guest, number, output, patience_s
        self._ended = threading.Event()
        self._code: int | None = None
        self._timed_out = False

    @property
    def output(self) -> str:
        """What it has printed so far; there also when the guest has died."""
        try:
            return self._path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def wait(self) -> Finished:
        """Waits for its end.

        Raises:
            GuestError: the guest died, or does not answer any more.
        """
        if not self._ended.wait(self._patience_s):
            raise GuestError(f"guest{self._guest.ident} hangs: a command did not end with its time-out\n{self.output}")
        if self._code is None:
            raise GuestError(f"guest{self._guest.ident} died while a command ran; it had printed:\n{self.output}")
        return Finished(self._code, self.output, self._timed_out)

    def follow(self, show: Callable[[str], None]) -> Finished:
        """Waits for its end, and shows what it prints as it comes, in whole lines."""
        shown = 0
        over = False
        while not over:
            over = self._ended.wait(_LOOK_S)
            with suppress(FileNotFoundError):
                fresh = self._path.read_bytes()[shown:]
                fresh = fresh if over else fresh[: fresh.rfind(b"\n") + 1]
                shown += len(fresh)
                if fresh:
                    show(fresh.decode(errors="replace"))
        return self.wait()

    def kill(self) -> None:
        """Kills it with all it has started; `wait` then gives -9."""
        self._guest.stop_command(self._number)

    def finish(self, code: int, timed_out: bool) -> None:
        """Called by the guest's reader: it has ended."""
        self._code, self._timed_out = code, timed_out
        self._ended.set()

    def lost(self) -> None:
        """Called by the guest: nobody will tell any more how it ends."""
        self._ended.set()
