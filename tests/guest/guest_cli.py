"""Owns running one command in a guest by hand: what `scripts/guest` starts."""

from __future__ import annotations

import argparse
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import guest_python
from guest import Guest, booted_pair
from guest_command import Running
from guest_files import GuestError
from guest_setup import unavailable


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/guest",
        description="Boots an emulated machine with Soft-RoCE, runs a command in it, exits with the command's code. "
        "The files of this machine are there, read-only; what the command writes is lost, except under $EXCHANGE.",
    )
    parser.add_argument("--two", action="store_true", help="two guests on one wire: both run it; $GUEST is 0 or 1")
    parser.add_argument("--cpus", type=int, default=0, help="cores of each (default: 2, or 1 with --two)")
    parser.add_argument("--memory", type=int, default=2048, help="memory of each, in MiB (default: %(default)s)")
    parser.add_argument("--mtu", type=int, default=1500, help="of the wire (default: %(default)s)")
    parser.add_argument("--rails", type=int, default=1, help="network and RDMA devices (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="of the command, in seconds (default: %(default)s)")
    parser.add_argument("--precompile", action="store_true", help="compiles gfkernels for the guest here, beforehand")
    parser.add_argument("command", nargs="+", help="one word: a line for bash; more: a program and its arguments")
    return parser.parse_args(argv)


def _follow(running: Running, label: str, codes: dict[str, int]) -> None:
    def show(text: str) -> None:
        for line in text.splitlines():
            print(f"{label}{line}", flush=True)

    try:
        done = running.follow(show)
    except GuestError as error:
        print(f"{label}{error}", file=sys.stderr)
        codes[label] = 125
        return
    codes[label] = 124 if done.timed_out else done.code if done.code >= 0 else 128 - done.code


def _run_on(guests: Sequence[Guest], arguments: argparse.Namespace) -> int:
    line = arguments.command[0] if len(arguments.command) == 1 else shlex.join(arguments.command)
    cwd = Path.cwd()
    print(f"guest: up after {max(guest.boot_s for guest in guests):.0f} s", file=sys.stderr)
    for guest in guests if arguments.precompile else []:
        guest.precompile()
    codes: dict[str, int] = {}
    threads = []
    for guest in guests:
        running = guest.start(line, cwd=cwd, timeout_s=arguments.timeout)
        label = f"[{guest.ident}] " if len(guests) > 1 else ""
        threads.append(threading.Thread(target=_follow, args=(running, label, codes)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return max(codes.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; its exit code, 124 after a time-out, 125 where there is no guest."""
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    if reason := unavailable():
        print(reason, file=sys.stderr)
        return 125
    path, note = guest_python.interpreter()
    print(f"guest: python is {path}: {note}", file=sys.stderr)
    memory_mib, n_cpus = arguments.memory, arguments.cpus or (1 if arguments.two else 2)
    try:
        if arguments.two:
            mtu, n_rails = arguments.mtu, arguments.rails
            with booted_pair(n_cpus=n_cpus, memory_mib=memory_mib, mtu=mtu, n_rails=n_rails) as pair:
                return _run_on(pair, arguments)
        with Guest(n_cpus=n_cpus, memory_mib=memory_mib, n_rails=arguments.rails) as guest:
            return _run_on([guest], arguments)
    except GuestError as error:
        print(f"guest: {error}", file=sys.stderr)
        return 125


if __name__ == "__main__":
    sys.exit(main())
