"""Owns starting real ranks for a test: each in a process group of its own, under a deadline, always gone at the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Ended:
    """How a rank ended: exit status (negative: signal), and what it reported, one JSON object a line."""

    status: int
    output: str
    reports: list[dict[str, Any]] = field(default_factory=list)


class Ranks:
    """Some ranks running a script.

    Args:
        size: how many.
        script: file below this folder.
        arguments: of the script.
        options: `GFKERNELS_*` settings by option name.
        prefix: a command in front of every rank's.
    """

    def __init__(
        self, size: int, script: str, *arguments: str, options: dict[str, Any] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(size):
            environment = {k: v for k, v in os.environ.items() if not k.startswith("GFKERNELS_") or "CACHE" in k}
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                            "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                            "OMP_NUM_THREADS": "1"}  # fmt: skip
            environment |= {f"GFKERNELS_{name.upper()}": str(value) for name, value in (options or {}).items()}
            environment["PYTHONPATH"] = str(ROOT)
            command = [*prefix, sys.executable, "-u", str(Path(__file__).with_name(script)), *arguments]
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=ROOT,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.processes.append(process)

    def wait_for(self, rank: int, word: str) -> None:
        """Reads a rank's output until a line begins with this word."""
        stream = self.processes[rank].stdout
        assert stream is not None
        for line in stream:
            if line.startswith(word):
                return
        raise AssertionError(f"rank {rank} ended without saying {word!r}")

    def say(self, rank: int, word: str) -> None:
        """Writes a line to a rank."""
        stream = self.processes[rank].stdin
        assert stream is not None
        stream.write(word + "\n")
        stream.flush()

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to a rank alone."""
        os.kill(self.processes[rank].pid, number)

    def state(self, rank: int) -> str:
        """The kernel's letter for what a rank's process does: "T" is stopped."""
        return Path(f"/proc/{self.processes[rank].pid}/stat").read_text().rpartition(")")[2].split()[0]

    def end(self, seconds: float = 90.0) -> list[Ended]:
        """Waits for all; whoever is not done by then is killed, and reported so."""
        deadline, ended = time.monotonic() + seconds, []
        for process in self.processes:
            try:
                output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill()
                output, _ = process.communicate()
                output += f"\n(killed after {seconds:g} s)"
            reports = [json.loads(line[7:]) for line in output.splitlines() if line.startswith("REPORT ")]
            ended.append(Ended(process.returncode, output, reports))
        self.kill()
        return ended

    def kill(self) -> None:
        """Kills all of them and their children."""
        for process in self.processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def run(size: int, script: str, *arguments: str, options: dict[str, Any] | None = None, **more: Any) -> list[Ended]:
    """Runs ranks to their end and asserts that all ended well."""
    ended = Ranks(size, script, *arguments, options=options, **more).end()
    for rank, one in enumerate(ended):
        assert one.status == 0, f"rank {rank} ended with {one.status}:\n{one.output}"
    return ended
