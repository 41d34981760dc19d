"""Owns `gfkernels run`: starts the ranks of a job on this host, marks their output, and leaves no process behind."""

from __future__ import annotations

import ctypes
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Annotated, Any, Final

import typer

CONTEXT_SETTINGS: Final[dict[str, Any]] = {"allow_interspersed_args": False, "ignore_unknown_options": False}
"""For `app.command("run", context_settings=CONTEXT_SETTINGS)`: options after the script are the script's."""

_PR_SET_PDEATHSIG: Final = 1
_GRACE_S: Final = 5.0
"""Between SIGTERM and SIGKILL."""
_TIMED_OUT: Final = 124
"""Exit code of a job that --timeout ended, as timeout(1) has it."""
_DRAIN_S: Final = 1.0
"""How long output is still read from pipes that something other than a rank holds open."""


def run_command(
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="A Python script, or another program, and its args.")
    ],
    n: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Number of ranks to start on this host.")] = 2,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.0, help="Seconds after which the job is ended (exit code 124).")
    ] = None,
    tag_output: Annotated[
        bool, typer.Option("--tag-output/--no-tag-output", help="Put the rank in front of every line.")
    ] = True,
    bind_cores: Annotated[
        bool, typer.Option("--bind-cores", help="Give every rank its own share of this process's cores.")
    ] = False,
) -> None:
    """Run a script as N ranks on this host.

    The first rank that fails ends the job: the others get SIGTERM, after 5 s SIGKILL, and its exit code is the job's.
    """
    raise typer.Exit(launch(command, n, module=module, timeout=timeout, tag_output=tag_output, bind_cores=bind_cores))


def launch(
    command: Sequence[str],
    n: int,
    *,
    module: bool = False,
    timeout: float | None = None,
    tag_output: bool = True,
    bind_cores: bool = False,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Runs `command` as `n` ranks and returns the job's exit code.

    Args:
        command: script (or module, or program) and arguments.
        n: number of ranks.
        module: the first word is a module's name.
        timeout: seconds; None: no limit.
        tag_output: put the rank in front of every line.
        bind_cores: split this process's cores among the ranks.
        environ: the ranks' environment before ours is added; None: this process's.

    Returns:
        0; or the code of the first rank that failed (128 + the signal, if one ended it); 124 after a time-out; 128 +
        the signal that this process got.
    """
    words = command_line(command, module)
    base = rank_environment(os.environ if environ is None else environ, n)
    cores = _shares(n) if bind_cores else [None] * n
    job = _Job(n, tag_output)
    with _forwarded(job):
        try:
            for rank in range(n):
                job.start(words, {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cores[rank])
            return job.supervise(None if timeout is None else time.monotonic() + timeout)
        finally:
            job.close()


def command_line(command: Sequence[str], module: bool) -> list[str]:
    """What a rank executes: Python for scripts and modules, else the program itself."""
    first = command[0]
    if module:
        return [sys.executable, "-m", *command]
    if first.endswith((".py", ".pyc", ".pyz")) or os.path.isdir(first):
        return [sys.executable, *command]
    if shutil.which(first) is not None:
        return list(command)
    if os.path.exists(first):
        return [sys.executable, *command]
    raise typer.BadParameter(f"{first!r} is neither a file nor a program (for a module: -m)")


def rank_environment(environ: Mapping[str, str], n: int) -> dict[str, str]:
    """The variables that all ranks of a new job share: torchrun's names, and a secret of the job's own."""
    return {
        **environ,
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GFKERNELS_SECRET": secrets.token_hex(32),
        "GFKERNELS_JOB_ID": f"run-{secrets.token_hex(8)}",
        # A rank writes into a pipe, where Python would keep its lines back.
        "PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED", "1"),
    }


def free_port() -> int:
    """A loopback port that nobody uses now, with room for the store's 16 above it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        if port < 65000:
            return port


@dataclass
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    partial: dict[int, bytes] = field(default_factory=dict)
    code: int | None = None

    def ended(self) -> bool:
        """Whether the process has ended; what it left of its own children is killed then."""
        if self.code is None and self._exited():
            # Not reaped yet, so the number of its group cannot have become anybody else's.
            self.signal_group(signal.SIGKILL)
            code = self.process.wait()
            self.code = code if code >= 0 else 128 - code
        return self.code is not None

    def _exited(self) -> bool:
        if hasattr(os, "waitid"):
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return self.process.poll() is not None

    def signal_group(self, number: int) -> None:
        """Signals the rank and its children; only before the rank is reaped."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class _Job:
    """The ranks of a job, and how it ends."""

    def __init__(self, n: int, tag_output: bool) -> None:
        self._n = n
        self._tag = tag_output
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._code: int | None = None
        self._kill_at: float | None = None
        self._requests: list[int] = []

    def start(self, words: list[str], environ: dict[str, str], cores: set[int] | None) -> None:
        """Starts the next rank, in a session of its own, so that its children can be ended with it."""
        pipe = subprocess.PIPE if self._tag else None
        process = subprocess.Popen(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            preexec_fn=_child_setup(os.getpid(), cores),
        )
        rank = _Rank(len(self._ranks), process)
        self._ranks.append(rank)
        # Ranks that fail because another one did follow within milliseconds: descriptors tell who was first.
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):
                self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, (rank, None))
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream, selectors.EVENT_READ, (rank, target))

    def supervise(self, deadline: float | None) -> int:
        """Passes output on until all ranks have ended."""
        while self._running():
            self._notice(self._pass_on(0.05))
            now = time.monotonic()
            while self._requests:
                number = self._requests.pop(0)
                self._end(128 + number, number)
            if deadline is not None and now >= deadline and self._code is None:
                running = ", ".join(str(rank.rank) for rank in self._running())
                self._say(f"the time is over (--timeout); still running: rank {running}")
                self._end(_TIMED_OUT)
            if self._kill_at is not None and now >= self._kill_at:
                self._signal(signal.SIGKILL)
        end = time.monotonic() + _DRAIN_S
        while self._selector.get_map() and time.monotonic() < end:
            self._pass_on(0.05)
        return self._code or 0

    def request(self, number: int) -> None:
        """From a signal handler: passes the signal on to the ranks; the second kills them."""
        self._requests.append(number)

    def close(self) -> None:
        """Kills what is left."""
        self._signal(signal.SIGKILL)
        end = time.monotonic() + _GRACE_S
        while not all(rank.ended() for rank in self._ranks) and time.monotonic() < end:
            time.sleep(0.01)
        self._selector.close()

    def _notice(self, ended: list[_Rank]) -> None:
        for rank in [*ended, *self._ranks]:
            if rank.ended() and rank.code and self._code is None:
                self._say(f"rank {rank.rank} {_ending(rank.code)}; ending the others")
                self._end(rank.code)

    def _end(self, code: int, number: int = signal.SIGTERM) -> None:
        # The first code stays: what follows is its consequence.
        if self._code is None:
            self._code = code
            self._kill_at = time.monotonic() + _GRACE_S
            self._signal(number)
        else:
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for rank in self._running():
            rank.signal_group(number)

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.code is None]

    def _pass_on(self, seconds: float) -> list[_Rank]:
        """Waits for output and passes it on; returns the ranks that ended, first things first."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return []
        ended = []
        for key, _ in self._selector.select(seconds):
            rank, target = key.data
            if target is None:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                ended.append(rank)
                continue
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            lines = (rank.partial.pop(key.fd, b"") + data).split(b"\n")
            # Only whole lines go out, so that ranks do not cut into each other's; the last one when the pipe ends.
            if data:
                rank.partial[key.fd] = lines.pop()
            else:
                lines = [line for line in lines if line]
                self._selector.unregister(key.fileobj)
            self._print(target, rank.rank, lines)
        return ended

    def _print(self, target: IO[str], rank: int, lines: list[bytes]) -> None:
        if lines:
            width = len(str(self._n - 1))
            target.write("".join(f"[{rank:>{width}}] {line.decode(errors='replace')}\n" for line in lines))
            target.flush()

    @staticmethod
    def _say(text: str) -> None:
        print(f"gfkernels run: {text}", file=sys.stderr, flush=True)


def _ending(code: int) -> str:
    with suppress(ValueError):
        if code > 128:
            return f"was ended by {signal.Signals(code - 128).name}"
    return f"failed with exit code {code}"


def _shares(n: int) -> list[set[int] | None]:
    if not hasattr(os, "sched_getaffinity"):
        raise typer.BadParameter("--bind-cores needs sched_setaffinity, which this system has not")
    cores = sorted(os.sched_getaffinity(0))
    if n > len(cores):
        return [{cores[rank % len(cores)]} for rank in range(n)]
    return [set(cores[len(cores) * rank // n : len(cores) * (rank + 1) // n]) for rank in range(n)]


def _child_setup(launcher: int, cores: set[int] | None) -> Callable[[], None]:
    # Looked up before the fork: nothing may be imported or allocated lazily after it.
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None) if sys.platform == "linux" else None

    def setup() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != launcher:
                # The launcher died before the request; there will be no signal.
                os._exit(1)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return setup


@contextmanager
def _forwarded(job: _Job) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to the ranks, which are not in the terminal's group; a second one kills."""

    def forward(number: int, frame: FrameType | None) -> None:
        job.request(number)

    saved = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in saved.items():
            signal.signal(number, handler)
