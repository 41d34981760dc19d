"""Owns real ranks as a test sees them: forked from a nursery, each in a session of its own, hurt, heard, and ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100
"""A rank that is still there after so long is killed."""
NOTICED_S = 3.0
"""Within which a death must be noticed: the promise is one second, the rest is for a busy machine."""


class Nursery:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("GFKERNELS_") or "CACHE" in k}
        environment |= {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(Path(__file__).with_name("fault_nursery.py")), str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._socket.settimeout(240)
        try:
            assert self._read() == {"loaded": True}
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *details: object) -> None:
        self._socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fork(self, order: dict[str, Any], fds: Sequence[int]) -> int:
        """Starts a rank; its process id."""
        socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
        while True:
            message = self._take()
            if "began" in message:
                return int(message["began"])

    def status(self, pid: int, deadline: float) -> int | None:
        """How a process ended (negative: by which signal); None if it has not by then."""
        while pid not in self.statuses:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                self._take()
            except TimeoutError:
                return None
            finally:
                self._socket.settimeout(240)
        return self.statuses[pid]

    def _take(self) -> dict[str, Any]:
        message = self._read()
        if "ended" in message:
            self.statuses[int(message["ended"])] = int(message["status"])
        return message

    def _read(self) -> dict[str, Any]:
        data = self._socket.recv(1 << 16)
        assert data, f"the nursery ended with {self._process.poll()}"
        return dict(json.loads(data))


class World:
    """Some ranks running a case.

    Args:
        nursery: where they come from.
        size: how many.
        case: "module:function"; called with a `fault_rank.Rank` and the arguments.
        arguments: JSON.
        options: `GFKERNELS_*` settings by option name.
    """

    def __init__(
        self, nursery: Nursery, size: int, case: str, arguments: Sequence[Any], options: dict[str, Any]
    ) -> None:
        self.size = size
        self._nursery = nursery
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pids: list[int] = []
        self._sockets: list[socket.socket] = []
        self._buffers = [b""] * size
        self._logs = [_nameless_file() for _ in range(size)]
        self._heard: list[list[dict[str, Any]]] = [[] for _ in range(size)]
        settings = {f"GFKERNELS_{name.upper()}": str(value) for name, value in options.items()}
        for rank in range(size):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                           "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port)} | settings  # fmt: skip
            ours, theirs = socket.socketpair()
            order = {"case": case, "arguments": list(arguments), "environment": environment, "limit_s": LIMIT_S}
            self.pids.append(nursery.fork(order, [theirs.fileno(), self._logs[rank].fileno()]))
            theirs.close()
            self._sockets.append(ours)

    def all(self) -> range:
        """Every rank."""
        return range(self.size)

    def others(self, rank: int) -> list[int]:
        """Every rank but one."""
        return [q for q in self.all() if q != rank]

    def report(self, rank: int, what: str = "call", *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Waits for a rank's next report of this name; earlier ones of other names stay."""
        deadline = time.monotonic() + timeout_s
        while True:
            for i, found in enumerate(self._heard[rank]):
                if found["what"] == what:
                    return self._heard[rank].pop(i)
            if not self._listen(rank, deadline):
                raise AssertionError(
                    f"rank {rank} did not report {what!r} ({self.describe(rank)}), but {self._heard[rank]}\n"
                    + "\n".join(f"-- rank {q}, {self.describe(q)}:\n{self.log(q)}" for q in self.all())
                )

    def reports(self, what: str = "call", ranks: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """The next report of this name of all or some ranks."""
        return [self.report(rank, what) for rank in (self.all() if ranks is None else ranks)]

    def _listen(self, rank: int, deadline: float) -> bool:
        while b"\n" not in self._buffers[rank]:
            left = deadline - time.monotonic()
            self._sockets[rank].settimeout(max(0.001, min(0.1, left)))
            try:
                data = self._sockets[rank].recv(1 << 16)
            except TimeoutError:
                # A forked child may hold the socket open when the rank itself is gone.
                if left <= 0 or self._nursery.status(self.pids[rank], 0) is not None:
                    return False
                continue
            except ConnectionError:
                data = b""
            if not data:
                return False
            self._buffers[rank] += data
        line, _, self._buffers[rank] = self._buffers[rank].partition(b"\n")
        self._heard[rank].append(json.loads(line))
        return True

    def tell(self, word: str, ranks: Sequence[int] | None = None) -> None:
        """Sends a word to all or some ranks."""
        for rank in self.all() if ranks is None else ranks:
            self._sockets[rank].sendall(word.encode() + b"\n")

    def hurt(self, rank: int, number: int) -> float:
        """Sends a signal to one rank; when."""
        at = time.monotonic()
        os.kill(self.pids[rank], number)
        return at

    def stop(self, rank: int) -> float:
        """SIGSTOP; returns once the kernel says that it is stopped."""
        at = self.hurt(rank, signal.SIGSTOP)
        until(lambda: self.state(rank) == "T", f"rank {rank} is not stopped")
        return at

    def state(self, rank: int) -> str:
        """The kernel's letter for what a rank's process does: "T" is stopped; "" once it is gone."""
        try:
            return Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return ""

    def status(self, rank: int, seconds: float = 60.0) -> int | None:
        """How a rank ended (negative: by which signal); None if it has not in that time."""
        return self._nursery.status(self.pids[rank], time.monotonic() + seconds)

    def end(self, statuses: dict[int, int] | None = None, *, seconds: float = 60.0) -> None:
        """Waits for all ranks and asserts how they ended: 0 unless told otherwise."""
        for rank in self.all():
            status, expected = self.status(rank, seconds), (statuses or {}).get(rank, 0)
            if status is None:
                self.hurt(rank, signal.SIGUSR1)  # faulthandler writes down where it hangs
                time.sleep(0.5)
            assert status == expected, f"rank {rank} ended with {status}, not {expected}:\n{self.log(rank)}"

    def log(self, rank: int) -> str:
        """What a rank has printed."""
        return os.pread(self._logs[rank].fileno(), 1 << 20, 0).decode(errors="replace")

    def describe(self, rank: int) -> str:
        """For messages: whether a rank runs."""
        status = self._nursery.status(self.pids[rank], 0)
        return f"state {self.state(rank)}" if status is None else f"ended with {status}"

    def kill(self) -> list[int]:
        """Kills what is left; the processes of ranks' sessions that had outlived all ranks."""
        alive = [pid for pid in self.pids if self._nursery.status(pid, 0) is None]
        stragglers = [] if alive else [pid for session in self.pids for pid in members(session)]
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in alive:
            self._nursery.status(pid, time.monotonic() + 10)
        for connection in self._sockets:
            connection.close()
        for log in self._logs:
            log.close()
        return stragglers


def _nameless_file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def members(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def until(holds: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)
