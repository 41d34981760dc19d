"""Owns real ranks for tests: interpreters on this host that run functions in turn, under a deadline, and always end."""

from __future__ import annotations

import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import gfkernels
from gfkernels.errors import GfkernelsError
from gfkernels.testing.frames import send, take

_AFTER_FAILURE_S: Final = 5.0
"""How long the other ranks have, once one has failed, to say how they fared."""
_LAST_WORDS_S: Final = 0.5
_END_S: Final = 10.0
_OUTPUT_CHARS: Final = 6000


@dataclass
class Outcome:
    """How a function ended on one rank.

    Attributes:
        value: what it returned.
        error: what it raised, or why there is no answer; None if it returned.
        traceback: where it was raised.
        output: what the rank has printed since it started (its end, if that is long).
    """

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    output: str = ""


class RanksFailed(GfkernelsError):
    """A function raised, or did not end, on some ranks.

    Attributes:
        outcomes: one `Outcome` per rank.
    """

    def __init__(self, message: str, outcomes: Sequence[Outcome] = ()) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


def run_ranks(
    n: int,
    target: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    prefix: Callable[[int], Sequence[str]] | None = None,
) -> list[Any]:
    """Runs a function on real ranks of this host, each a fresh interpreter, and ends them.

    The launcher's variables are set, so `gfkernels.init()` in the function joins the ranks.

    Args:
        n: number of ranks.
        target: a function that can be imported: at the top level of its module, no lambda.
        args: its arguments, picklable.
        env: environment variables besides this process's.
        options: settings by name, as for `gfkernels.init`; they go into the environment as `GFKERNELS_*`.
        timeout: seconds for all of it; what still runs then is killed.
        prefix: gives, for a rank, the words of a command that starts the interpreter, such as `["taskset", "-c", "0"]`.

    Returns:
        What the function returned, by rank.

    Raises:
        RanksFailed: a rank raised, ended, was not done in time, or did not exit well; shows tracebacks and output.
    """
    with RankPool(n, env=env, options=options, timeout=timeout, prefix=prefix) as pool:
        return pool.run(target, *args)


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    commands: int
    results: int
    log: Path
    received: bytearray = field(default_factory=bytearray)

    def output(self) -> str:
        """The end of what it printed."""
        text = self.log.read_bytes().decode(errors="replace")
        return text if len(text) <= _OUTPUT_CHARS else "…" + text[-_OUTPUT_CHARS:]

    def kill(self) -> None:
        """Ends it and its children."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class RankPool:
    """Ranks that stay: each `run` costs a message instead of new interpreters. A context manager.

    Ranks start at the first `run`, and again at the next one after a failure, so that no function finds what another
    one left broken. Not for several threads at once.

    Args:
        n: number of ranks.
        env, options, prefix: as for `run_ranks`.
        timeout: seconds for one `run`, starting included.
    """

    def __init__(
        self,
        n: int,
        *,
        env: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
        prefix: Callable[[int], Sequence[str]] | None = None,
    ) -> None:
        if n < 1:
            raise ValueError(f"n={n}: at least one rank")
        self.n, self.timeout = n, timeout
        self._env, self._options, self._prefix = dict(env or {}), dict(options or {}), prefix
        self._ranks: list[_Rank] = []
        self._folder: str | None = None

    def run(self, target: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Runs a function on all ranks, at once.

        Args:
            target: as for `run_ranks`.
            *args: its arguments.
            timeout: seconds; None: the pool's.

        Returns:
            What it returned, by rank.

        Raises:
            RanksFailed: as `run_ranks`. All ranks have been killed then.
        """
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        command = _command(target, args)
        try:
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                with suppress(BrokenPipeError):  # it has died; collecting says how
                    send(rank.commands, command)
            outcomes = self._collect(deadline, seconds)
        except BaseException:
            self.kill()
            raise
        if any(outcome.error is not None for outcome in outcomes):
            self.kill()
            raise RanksFailed(
                _report(f"{target.__qualname__} on {self.n} rank{'s' * (self.n > 1)}", outcomes), outcomes
            )
        return [outcome.value for outcome in outcomes]

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while no ranks run."""
        return [rank.process.pid for rank in self._ranks]

    @property
    def outputs(self) -> list[str]:
        """What the ranks have printed, stdout and stderr together, by rank."""
        return [rank.output() for rank in self._ranks]

    def close(self) -> None:
        """Lets the ranks exit.

        Raises:
            RanksFailed: one did not, or exited by an error; interpreters that end badly are a failure too.
        """
        for rank in self._ranks:
            os.close(rank.commands)
            rank.commands = -1
        deadline = time.monotonic() + _END_S
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        outcomes = [
            Outcome(
                error=None if rank.process.returncode == 0 else ChildProcessError(_how_it_ended(rank.process)),
                output=rank.output(),
            )
            for rank in self._ranks
        ]
        self.kill()
        if any(outcome.error is not None for outcome in outcomes):
            raise RanksFailed(_report("exit", outcomes), outcomes)

    def kill(self) -> None:
        """Ends the ranks and their children at once."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()
            for descriptor in (rank.commands, rank.results):
                if descriptor >= 0:
                    os.close(descriptor)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()

    def _start(self) -> None:
        from gfkernels.cli.run import rank_environment  # ranks import this module too, and need no command line

        self._folder = tempfile.mkdtemp(prefix="gfkernels-ranks-")
        variables = rank_environment(os.environ, self.n)
        variables |= {f"GFKERNELS_{name.upper()}": str(value) for name, value in self._options.items()}
        variables |= self._env
        paths = [str(Path(gfkernels.__file__).parents[1]), variables.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        for number in range(self.n):
            self._start_rank(number, {**variables, "RANK": str(number), "LOCAL_RANK": str(number)})

    def _start_rank(self, number: int, variables: dict[str, str]) -> None:
        assert self._folder is not None
        words = [] if self._prefix is None else list(self._prefix(number))
        inner_commands, commands = os.pipe()
        results, inner_results = os.pipe()
        log = Path(self._folder) / f"{number}.log"
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*words, sys.executable, "-m", "gfkernels.testing.rank", str(inner_commands), str(inner_results)],
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(inner_commands, inner_results),
                    start_new_session=True,
                )
        except BaseException:
            os.close(commands)
            os.close(results)
            raise
        finally:
            os.close(inner_commands)
            os.close(inner_results)
        self._ranks.append(_Rank(process, commands, results, log))

    def _collect(self, deadline: float, seconds: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        failed = False
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                selector.register(rank.results, selectors.EVENT_READ, number)
            while len(outcomes) < self.n and time.monotonic() < deadline:
                for key, _ in selector.select(0.05):
                    data = os.read(key.fd, 1 << 20)
                    self._ranks[key.data].received += data
                    if not data:
                        selector.unregister(key.fd)
                for number, rank in enumerate(self._ranks):
                    if number not in outcomes and (outcome := _outcome(rank)) is not None:
                        outcomes[number] = outcome
                        if outcome.error is not None and not failed:
                            failed, deadline = True, min(deadline, time.monotonic() + _AFTER_FAILURE_S)
        late = [rank for number, rank in enumerate(self._ranks) if number not in outcomes]
        for rank in late:
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGUSR1)  # prints where every thread is
        if late:
            time.sleep(_LAST_WORDS_S)
        why = f"{_AFTER_FAILURE_S:g} s after the first failure" if failed else f"after {seconds:g} s"
        answers = [outcomes.get(q) or Outcome(error=TimeoutError(f"not done {why}")) for q in range(self.n)]
        for rank, answer in zip(self._ranks, answers, strict=True):
            answer.output = rank.output()
        return answers


def _command(target: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """A call as bytes. The function goes by name, and its module's file for test modules that no name leads to."""
    module = sys.modules.get(target.__module__)
    builtin = target.__module__ in sys.builtin_module_names
    file = "" if builtin else getattr(module, "__file__", None)
    if file is None or "<" in target.__qualname__:
        raise ValueError(
            f"{target.__module__}.{target.__qualname__} cannot be imported by another process; pass a function from "
            "the top level of a file"
        )
    return pickle.dumps((sys.path, target.__module__, os.path.abspath(file), target.__qualname__, pickle.dumps(args)))


def _outcome(rank: _Rank) -> Outcome | None:
    """The rank's answer, or how it ended without one; None while it runs."""
    # In this order: an answer may be complete just as its sender ends.
    ended = rank.process.poll() is not None
    if ended:
        _drain(rank)
    frame = take(rank.received)
    if frame is not None:
        kind, packed, text = pickle.loads(frame)
        if kind == "value":
            return Outcome(value=pickle.loads(packed))
        return Outcome(error=_error(packed, text), traceback=text)
    return Outcome(error=ChildProcessError(_how_it_ended(rank.process))) if ended else None


def _drain(rank: _Rank) -> None:
    os.set_blocking(rank.results, False)
    with suppress(BlockingIOError):
        while data := os.read(rank.results, 1 << 20):
            rank.received += data


def _error(packed: bytes, text: str) -> BaseException:
    with suppress(Exception):
        error = pickle.loads(packed)
        if isinstance(error, BaseException):
            return error
    return RuntimeError(text.strip().rpartition("\n")[2])


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    status = process.returncode
    if status is None:
        return f"did not exit in {_END_S:g} s"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _report(what: str, outcomes: Sequence[Outcome]) -> str:
    bad = [q for q, outcome in enumerate(outcomes) if outcome.error is not None]
    lines = [f"{what}: rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))} failed"]
    for q in bad:
        outcome = outcomes[q]
        lines.append(f"-- rank {q}: {type(outcome.error).__name__}: {outcome.error}")
        lines += [text.rstrip() for text in (outcome.traceback, outcome.output) if text.strip()]
    return "\n".join(lines)
