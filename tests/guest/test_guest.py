"""Owns the tests of the emulated guest itself: commands, devices, wires, faults, and that nothing is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import guest_files
import guest_python
import guest_setup
import pytest
from guest import EXCHANGE, Guest
from guest_wire import Wire

HERE = Path(__file__).resolve().parent

_ADDS = """
import numba, numpy
@numba.njit
def total(values):
    result = 0.0
    for value in values:
        result += value
    return result
print("total", total(numpy.arange(1000.0)))
"""
_DEVICES = """
import pyverbs.device as d
print("devices", [item.name.decode() for item in d.get_device_list()])
"""
_REDUCES = """
import numpy as np
import gfkernels as gf
with gf.init() as comm:
    assert (comm.allreduce(np.full(1000, 2.0, np.float32)) == 2 * comm.size).all()
    print("rank", comm.rank, "of", comm.size)
"""


def _processes(*words: str) -> list[int]:
    """Processes whose command lines hold all the words."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if all(word in line for word in words):
                found.append(int(folder.name))
    return found


def _gone(*words: str, within_s: float = 10) -> bool:
    deadline_s = time.monotonic() + within_s
    while _processes(*words) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return not _processes(*words)


def test_commands_are_kept_apart(guest: Guest) -> None:
    assert guest.run("echo one; echo two >&2; exit 3").output == "one\ntwo\n"
    for code in (0, 1, 3, 255):
        assert guest.run(f"exit {code}").code == code
    assert guest.run("kill -TERM $$").code == -signal.SIGTERM
    assert guest.run(["printf", "%s|", "a b", "$c", "*"]).output == "a b|$c|*|"
    assert guest.run(["/no/such/program"]).code in (126, 127)
    assert guest.run("true", cwd="/no/such/folder").code == 127
    assert guest.run('echo "$A"', env={"A": "two words"}).check() == "two words\n"
    assert guest.run("hostname; pwd; ulimit -l; id -u").check() == f"guest0\n{EXCHANGE}\nunlimited\n0\n"


def test_a_time_out_ends_the_command_and_what_it_started(guest: Guest) -> None:
    done = guest.run("echo begun; setsid sleep 1234 & sleep 1234", timeout_s=2)
    assert (done.code, done.output, done.timed_out) == (-signal.SIGKILL, "begun\n", True)
    assert guest.run("pgrep -f 'sleep 123[4]'").code == 1
    # So does the end of a command that leaves something behind.
    guest.run("setsid sleep 1235 & ").check()
    assert guest.run("pgrep -f 'sleep 123[5]'").code == 1


def test_commands_run_at_the_same_time(guest: Guest) -> None:
    waiting = guest.start("echo waiting; until [ -e go ]; do sleep 0.1; done; echo went", timeout_s=60)
    endless = guest.start("sleep 1000", timeout_s=1200)
    assert guest.run("touch go").code == 0
    assert waiting.wait().check() == "waiting\nwent\n"
    endless.kill()
    assert endless.wait().code == -signal.SIGKILL


def test_files_pass_both_ways(guest: Guest) -> None:
    data = os.urandom(1_000_000)
    (guest.exchange / "there").write_bytes(data)
    guest.run("cp there back; mkdir sub; echo more >sub/file").check()
    assert (guest.exchange / "back").read_bytes() == data
    assert (guest.exchange / "sub/file").read_text() == "more\n"
    # Everything else that it writes is its own.
    name = f"/usr/gfkernels-guest-{os.getpid()}"
    assert guest.run(f"touch {name} && ls {name}").code == 0
    assert not Path(name).exists()


def test_the_device_is_there(guest: Guest) -> None:
    assert "rxe0" in guest.run("ibv_devinfo").check()
    assert "PORT_ACTIVE" in guest.run("ibv_devinfo -d rxe0").check()
    gids = guest.run("grep -H . /sys/class/infiniband/rxe0/ports/1/gids/* /dev/null").check()
    (index,) = (
        line.partition(":")[0].rpartition("/")[2] for line in gids.splitlines() if line.endswith(":ffff:0a4d:0001")
    )
    assert guest.run(f"cat /sys/class/infiniband/rxe0/ports/1/gid_attrs/types/{index}").check() == "RoCE v2\n"


def test_the_interpreter_has_verbs_and_compiles(guest: Guest) -> None:
    path, note = guest_python.interpreter()
    print(f"{path}: {note}")
    assert "devices ['rxe0']" in guest.python("-c", _DEVICES).check()
    (guest.exchange / "adds.py").write_text(_ADDS)
    assert "total 499500.0" in guest.python("adds.py").check()


def test_a_bandwidth_test_over_loopback(guest: Guest) -> None:
    server = guest.start("ib_write_bw -d rxe0 -s 65536 -n 100 -F", timeout_s=60)
    client = "until ib_write_bw -d rxe0 -s 65536 -n 100 -F 10.77.0.1; do sleep 0.5; done"
    said = guest.run(client, timeout_s=60).check()
    server.wait().check()
    assert "BW average" in said and " 65536 " in said


def test_gfkernels_runs_on_code_that_was_compiled_outside(guest: Guest) -> None:
    guest.precompile()
    (guest.exchange / "reduces.py").write_text(_REDUCES)
    done = guest.python("-m", "gfkernels", "run", "-n", "2", "--timeout", "200", "reduces.py", timeout_s=220)
    assert "rank 0 of 2" in done.check() and "rank 1 of 2" in done.output


def test_a_death_is_noticed(guest: Guest) -> None:
    """Last of those that share a guest: it is killed."""
    exchange = str(guest.exchange)
    assert _processes(guest_setup.EMULATOR, exchange)
    running = guest.start("echo begun; sleep 1000", timeout_s=1200)
    while "begun" not in running.output:
        time.sleep(0.05)
    begin_s = time.monotonic()
    guest.kill()
    with pytest.raises(guest_files.GuestError, match=r"guest0 died while a command ran[^\n]*\nbegun"):
        running.wait()
    assert time.monotonic() - begin_s < 10
    assert not guest.alive
    with pytest.raises(guest_files.GuestError, match="gone"):
        guest.run("true")
    assert _gone(guest_setup.EMULATOR, exchange)


def test_two_guests_reach_each_other(two_guests: tuple[Guest, Guest]) -> None:
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda one: one.run("busybox ping -c 3 -W 5 guest$((1 - GUEST))").check(), two_guests))
    assert all(" 0% packet loss" in text for text in said)
    assert [one.run("hostname").check() for one in two_guests] == ["guest0\n", "guest1\n"]


def test_a_bandwidth_test_between_guests(two_guests: tuple[Guest, Guest]) -> None:
    server = two_guests[0].start("ib_write_bw -d rxe0 -s 65536 -n 100 -F", timeout_s=100)
    client = f"until ib_write_bw -d rxe0 -s 65536 -n 100 -F {Wire.address(0)}; do sleep 0.5; done"
    assert "BW average" in two_guests[1].run(client, timeout_s=100).check()
    server.wait().check()


def test_packets_are_lost_where_netem_says_so(two_guests: tuple[Guest, Guest]) -> None:
    first = two_guests[0]
    first.run("tc qdisc add dev eth0 root netem loss 100%").check()
    ping = f"busybox ping -c 3 -W 1 {Wire.address(1)}"
    assert "100% packet loss" in first.run(ping).output
    first.run("tc qdisc del dev eth0 root").check()
    assert " 0% packet loss" in first.run(ping).check()


def test_the_other_guest_outlives_one(two_guests: tuple[Guest, Guest]) -> None:
    """Last of those that share two guests: one is killed."""
    first, second = two_guests
    first.kill()
    assert not first.alive and second.alive
    assert "100% packet loss" in second.run(f"busybox ping -c 2 -W 1 {Wire.address(0)}").output
    second.close()
    assert not second.exchange.exists()
    assert _gone(guest_setup.EMULATOR, str(second.exchange))


_HOLDS_A_PROCESS = """
import subprocess, sys, os, time
leash, *command = sys.argv[1:]
subprocess.Popen([sys.executable, "-I", "-S", leash, str(os.getpid()), *command])
print("started", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("whom", ["owner", "leash"])
def test_a_killed_owner_leaves_no_emulator(whom: str) -> None:
    """The leash is tested on a process that costs nothing."""
    mark = f"54321.{os.getpid()}"
    sleeps = ["sleep", mark]
    owner = _owner(sleeps)
    try:
        while not (slept := [pid for pid in _processes(*sleeps) if _name(pid) == "sleep"]):
            time.sleep(0.02)
        (leash,) = (pid for pid in _processes("guest_leash.py", mark) if pid != owner.pid)
        os.kill(owner.pid if whom == "owner" else leash, signal.SIGKILL)
        deadline_s = time.monotonic() + 10
        while any(_name(pid) == "sleep" for pid in slept) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not any(_name(pid) == "sleep" for pid in slept)
    finally:
        owner.kill()
        owner.communicate()


def _owner(command: Sequence[str]) -> subprocess.Popen[bytes]:
    script = [sys.executable, "-c", _HOLDS_A_PROCESS, str(HERE / "guest_leash.py"), *command]
    return subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _name(pid: int) -> str:
    """The program that a process runs; "" for one that has ended."""
    try:
        return os.path.basename(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


def test_an_end_of_a_wire_is_taken_once() -> None:
    with Wire(n_rails=2) as wire:
        taken = wire.take(0)
        assert len(taken) == 2
        for end in taken:
            end.close()
        with pytest.raises(ValueError, match="needs a new wire"):
            wire.take(0)


def test_a_folder_without_anything_prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GFTEST_GUEST_DIR", str(tmp_path / "empty"))
    assert "make guest" in guest_setup.unavailable()
    with pytest.raises(guest_files.GuestError):
        guest_setup.manifest()
