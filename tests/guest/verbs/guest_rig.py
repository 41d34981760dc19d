"""Owns what programs in the guest share: ranks as forked processes with an exchange between them, and small helpers."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from gfkernels.transport.conformance_rig import Endpoint, compiled
from gfkernels.transport.meeting import Exchange
from gfkernels.transport.verbs.channels import VerbsChannels
from gfkernels.transport.verbs.connect import connect
from gfkernels.transport.verbs.rail import Rail, close_rails, open_rails
from gfkernels.transport.verbs.settings import Settings

QUICK = Settings(timeout_exponent=16, retry_count=3)
"""A lost peer is noticed in about a second, and emulation does not look like loss."""

Part = Callable[[int, Exchange], None]


def run_ranks(part: Part, size: int, *, killed: tuple[int, ...] = ()) -> None:
    """Runs `part(rank, exchange)` in a forked process a rank; raises where one fails.

    Args:
        part: called in each child.
        size: number of ranks.
        killed: ranks that are expected to die by a signal.
    """
    pipes = [socket.socketpair() for _ in range(size)]
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            for other, (near, far) in enumerate(pipes):
                near.close()
                if other != rank:
                    far.close()
            _child(part, rank, pipes[rank][1])
        pids.append(pid)
    for _, far in pipes:
        far.close()
    _serve([near.makefile("rwb") for near, _ in pipes])
    for near, _ in pipes:
        near.close()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    bad = [(rank, code) for rank, code in enumerate(codes) if (code >= 0 if rank in killed else code != 0)]
    assert not bad, f"(rank, exit code): {bad}"


def _child(part: Part, rank: int, sock: socket.socket) -> None:
    pipe = sock.makefile("rwb")

    def exchange(value: object) -> list[Any]:
        pipe.write(json.dumps(value).encode() + b"\n")
        pipe.flush()
        answer: list[Any] = json.loads(pipe.readline())
        return answer

    try:
        part(rank, exchange)
    except BaseException:
        print(f"rank {rank}:", traceback.format_exc(), flush=True)
        os._exit(1)
    pipe.close()
    sock.close()
    sys.stdout.flush()
    sys.exit(0)  # not _exit: leaving an interpreter in order is part of what is tested


def _serve(pipes: list[Any]) -> None:
    """Hands every rank what all ranks said, until all are gone."""
    while True:
        lines = [pipe.readline() for pipe in pipes]
        if not all(lines):
            return
        answer = json.dumps([json.loads(line) for line in lines]).encode() + b"\n"
        for pipe in pipes:
            pipe.write(answer)
            pipe.flush()


def open_and_connect(
    rank: int, size: int, exchange: Exchange, settings: Settings = QUICK, timeout_s: float = 20.0
) -> tuple[VerbsChannels, list[Rail]]:
    """A connected rank; `finish` ends it."""
    rails = open_rails(settings)
    try:
        return (
            connect(rank, size, exchange=exchange, rails=rails, settings=settings, timeout_s=timeout_s),
            rails,
        )
    except BaseException:
        close_rails(rails)
        raise


def finish(ends: VerbsChannels, rails: list[Rail], *, leave: bool = True) -> None:
    """Closes channels, then devices."""
    ends.close(leave=leave)
    close_rails(rails)


def endpoint(ends: VerbsChannels) -> Endpoint:
    """For calling the table as the conformance checks do."""
    return Endpoint(ends.rank, ends, compiled)


def wait_for(condition: Callable[[], bool], step: Callable[[], object], timeout_s: float, what: str) -> float:
    """Repeats `step` until `condition`; seconds that it took."""
    start = time.monotonic()
    while not condition():
        step()
        assert time.monotonic() - start < timeout_s, f"{what}: not in {timeout_s:g} s"
    return time.monotonic() - start


def descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sorted(found)


def main(*scenarios: Callable[[], None]) -> int:
    """Runs all scenarios, or those named on the command line; 0 where all pass."""
    wanted = sys.argv[1:]
    failed = []
    for scenario in scenarios:
        if wanted and scenario.__name__ not in wanted:
            continue
        start = time.monotonic()
        try:
            scenario()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failed.append(scenario.__name__)
        verdict = "FAILED" if scenario.__name__ in failed else "ok"
        print(f"{verdict:6} {scenario.__name__} {time.monotonic() - start:.1f} s", flush=True)
    return 1 if failed else 0
