"""Owns running commands inside a guest: takes requests from a serial port, and tells when each has ended and how.

One JSON object a line. In: `{"id", "argv", "env", "cwd", "timeout_s", "output"}`, `{"kill": id}` or `{"off": true}`.
Out: `{"up": seconds}` once, then `{"id", "code", "timed_out"}`. Runs under the distribution's python3 with nothing but
the standard library, and sleeps in one select() while nothing happens.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GROUPS = Path("/sys/fs/cgroup")
_JOIN_AND_RUN = 'echo 0 >"$1/cgroup.procs" 2>/dev/null; shift; exec "$@"'


@dataclass
class _Command:
    """A running command."""

    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    group: Path
    deadline_s: float
    timed_out: bool = False

    def kill(self) -> None:
        """Kills the command with everything it has started, also what left its process group."""
        try:
            (self.group / "cgroup.kill").write_text("1")
        except OSError:  # a kernel before 5.14
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Agent:
    """Serves one port until it is told to stop, or its other end is gone."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._selector = selectors.DefaultSelector()
        self._selector.register(port, selectors.EVENT_READ)
        self._running: dict[int, _Command] = {}
        self._pending = b""

    def serve(self) -> None:
        """Returns when the guest shall be switched off."""
        self._say(up=float(Path("/proc/uptime").read_text().split()[0]))
        while True:
            for key, _ in self._selector.select(self._next_deadline_s()):
                if key.fd == self._port:
                    if not self._take():
                        return
                else:
                    self._finish(key.data)
            for command in self._running.values():
                if not command.timed_out and time.monotonic() >= command.deadline_s:
                    command.timed_out = True
                    command.kill()

    def _next_deadline_s(self) -> float | None:
        deadlines = [command.deadline_s for command in self._running.values() if not command.timed_out]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _take(self) -> bool:
        data = os.read(self._port, 1 << 16)
        self._pending += data
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "off" in request:
                return False
            if "kill" in request:
                if request["kill"] in self._running:
                    self._running[request["kill"]].kill()
            else:
                self._start(request)
        return bool(data)

    def _start(self, request: dict[str, Any]) -> None:
        number = request["id"]
        group = _GROUPS / f"command{number}"
        with suppress(OSError):
            group.mkdir()
        with open(request["output"], "ab") as output:
            try:
                process = subprocess.Popen(
                    ["/bin/sh", "-c", _JOIN_AND_RUN, "sh", str(group), *request["argv"]],
                    env={**os.environ, **request["env"]},
                    cwd=request["cwd"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                output.write(f"{error}\n".encode())
                self._say(id=number, code=127, timed_out=False)
                return
        deadline_s = time.monotonic() + request["timeout_s"]
        command = _Command(number, process, os.pidfd_open(process.pid), group, deadline_s)
        self._running[number] = command
        self._selector.register(command.pidfd, selectors.EVENT_READ, command)

    def _finish(self, command: _Command) -> None:
        code = command.process.wait()
        command.kill()
        self._selector.unregister(command.pidfd)
        os.close(command.pidfd)
        del self._running[command.number]
        # What was killed just now may take a moment to leave the group.
        for _ in range(50):
            try:
                command.group.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.01)
        self._say(id=command.number, code=code, timed_out=command.timed_out)

    def _say(self, **message: Any) -> None:
        os.write(self._port, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    Agent(os.open(sys.argv[1], os.O_RDWR)).serve()
