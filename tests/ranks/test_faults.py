"""Ranks are killed, stopped and interrupted at random moments, disagree and refuse; every rank must hear of it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from launch import Ended, Ranks, run

pytestmark = [pytest.mark.faults, pytest.mark.slow]
SIZE = 3
WAYS: dict[str, dict[str, Any]] = {"auto": {}, "tcp": {"transport": "tcp"}}
DEATH_IS_NOTICED_S = 3.0
"""The promise is one second; the rest is for a busy machine."""


def report(ended: Ended, what: str = "call") -> dict[str, Any]:
    """One of a rank's reports."""
    found = [one for one in ended.reports if one["what"] == what]
    assert found, f"no report of {what!r}:\n{ended.output}"
    return found[0]


def _moment() -> float:
    seconds = random.uniform(0.05, 0.6)
    print(f"after {seconds:.3f} s")
    return seconds


def _ready(ranks: Ranks) -> None:
    for rank in range(len(ranks.processes)):
        ranks.wait_for(rank, "READY")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("case", ["die", "die_idle", "die+fork"])
@pytest.mark.parametrize("way", [*WAYS, "cma"])
def test_a_killed_rank_is_noticed(way: str, case: str, victim: int) -> None:
    name, _, fork = case.partition("+")
    options = WAYS.get(way, {"transport": way})
    before = set(os.listdir("/dev/shm"))
    ranks = Ranks(SIZE, "fault_cases.py", name, str(victim), fork, options=options)
    _ready(ranks)
    time.sleep(_moment())
    ranks.signal(victim, signal.SIGKILL)
    killed_at = time.time()
    ended = ranks.end()
    assert ended[victim].status == -signal.SIGKILL, "the fault was not hit"
    for rank in set(range(SIZE)) - {victim}:
        one = report(ended[rank])
        assert "PeerLostError" in one["kinds"], one
        if way != "tcp":  # over TCP a neighbour that gave up first may be named
            assert one["rank"] == victim and f"rank {victim}" in one["message"]
        assert one["at"] - killed_at < DEATH_IS_NOTICED_S
        assert report(ended[rank], "after")["error"] == "CommunicatorBroken"
        assert ended[rank].status == 0
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if "gfk" in name], left


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["registered", "ordinary"])
@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_rank_times_out_and_writes_into_nobodys_memory(way: str, memory: str) -> None:
    options = {**WAYS[way], "timeout_s": 1.5}
    ranks = Ranks(SIZE, "fault_cases.py", "stop", "1", memory, options=options)
    _ready(ranks)
    time.sleep(_moment())
    ranks.signal(1, signal.SIGSTOP)
    time.sleep(0.05)
    assert ranks.state(1) == "T", "the fault was not hit"
    for rank in (0, 2):
        ranks.wait_for(rank, "REUSED")
    assert ranks.state(1) == "T"
    ranks.signal(1, signal.SIGCONT)
    time.sleep(0.3)
    for rank in (0, 2):
        ranks.say(rank, "go")
    ended = ranks.end()
    for rank in (0, 2):
        assert report(ended[rank], "untouched")["clean"], ended[rank].output
        assert report(ended[rank], "after")["error"] == "CommunicatorBroken"
    assert report(ended[1])["error"] is not None


@pytest.mark.parametrize("way", WAYS)
def test_a_short_stop_is_harmless(way: str) -> None:
    ranks = Ranks(SIZE, "fault_cases.py", "pause", options={**WAYS[way], "timeout_s": 20})
    _ready(ranks)
    time.sleep(_moment())
    ranks.signal(1, signal.SIGSTOP)
    time.sleep(0.5)
    assert ranks.state(1) == "T", "the fault was not hit"
    ranks.signal(1, signal.SIGCONT)
    assert [report(one, "sum")["value"] for one in ranks.end()] == [SIZE] * SIZE


@pytest.mark.slow
def test_a_suspended_waiter_has_not_timed_out() -> None:
    ranks = Ranks(SIZE, "fault_cases.py", "interrupt", "0", "call", options={"timeout_s": 4})
    _ready(ranks)
    time.sleep(0.3)
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGSTOP)
    time.sleep(5)
    assert ranks.state(0) == "T", "the fault was not hit"
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGCONT)
    ended = ranks.end()
    # Rank 2 came after 2.5 s and waited for the others until they went on: nobody counted the time of sleep.
    assert report(ended[0])["error"] is None and report(ended[1])["error"] is None


@pytest.mark.parametrize("call", ["call", "handle", "wait"])
@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_ends_a_call_at_once(way: str, call: str) -> None:
    ranks = Ranks(SIZE, "fault_cases.py", "interrupt", "0", call, options=WAYS[way])
    _ready(ranks)
    time.sleep(0.5)
    ranks.signal(0, signal.SIGINT)
    interrupted_at = time.time()
    ended = ranks.end()
    assert report(ended[0])["error"] == "KeyboardInterrupt", ended[0].output
    assert report(ended[0])["at"] - interrupted_at < 1.0
    for rank in (1, 2):
        one = report(ended[rank])
        assert "GfkernelsError" in one["kinds"] and "rank 0" in one["message"], one
    assert report(ended[1])["at"] - interrupted_at < DEATH_IS_NOTICED_S


@pytest.mark.slow
@pytest.mark.parametrize("what", ["count", "dtype", "op", "order", "wire", "list", "absent"])
@pytest.mark.parametrize("way", WAYS)
def test_a_mismatch_shows_every_rank_the_table(way: str, what: str) -> None:
    ended = run(SIZE, "fault_cases.py", "mismatch", "1", what, options=WAYS[way])
    for rank in (0, 1) if what == "absent" else range(SIZE):
        one = report(ended[rank])
        if (way, what, rank) == ("tcp", "root", 0) and one["error"] is None:
            # Over a network the root of a broadcast waits for nobody: it hears of it in its next call.
            assert report(ended[rank], "after")["error"] is not None
            continue
        assert one["error"] == "MismatchError" and one["picklable"], one
        assert [row["rank"] for row in one["table"]] == [0, 1, 2]
        if (way, what) == ("tcp", "root"):
            continue
        if what == "absent":
            assert one["table"][2] == {"rank": 2, "state": "not in the call"}
        else:
            assert one["table"][0] != one["table"][1] | {"rank": 0}
            assert one["table"][0] == one["table"][2] | {"rank": 0}
        assert report(ended[rank], "after")["error"] == "CommunicatorBroken"
        if way == "auto":
            assert report(ended[rank], "array")["clean"]


@pytest.mark.parametrize("when", ["late", "early", "all"])
def test_a_refused_call_is_heard_and_harms_nobody(when: str) -> None:
    ended = run(SIZE, "fault_cases.py", "refuse", "1", when)
    assert report(ended[1])["error"] == "UsageError"
    for rank in (0, 2):
        report(ended[rank], "went on")
        if when == "late":
            one = report(ended[rank])
            assert "UsageError" in one["kinds"] and "rank 1" in one["message"] and "read-only" in one["message"]
            assert one["at"] - report(ended[1])["at"] < 1.5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shutdown", "exit", "crash", "_exit", "abort"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_ends_is_missed(way: str, how: str) -> None:
    ended = Ranks(SIZE, "fault_cases.py", "leave", "1", how, options=WAYS[way]).end()
    for rank in (0, 2):
        one = report(ended[rank])
        if how == "abort":
            assert "TransportError" in one["kinds"] and "enough" in one["message"]
        else:
            assert one["error"] == "PeerLostError" and one["rank"] == 1, one
        if how == "crash":
            assert "boom" in ended[1].output


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_leaving_after_the_last_call_disturbs_nobody(way: str) -> None:
    for one in run(SIZE, "fault_cases.py", "last_call", options=WAYS[way]):
        report(one, "done")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_starting_again_leaves_nothing_behind(way: str) -> None:
    for one in run(SIZE, "fault_cases.py", "again", options=WAYS[way]):
        leaks = report(one, "leaks")
        for name in ("fds", "threads", "memfds"):
            assert leaks["after"][name] <= leaks["before"][name], leaks


@pytest.mark.parametrize("way", WAYS)
def test_a_forked_child_is_harmless(way: str) -> None:
    for one in run(SIZE, "fault_cases.py", "fork", options=WAYS[way]):
        assert report(one, "fork")["status"] == 0


def test_too_little_memory_is_an_error() -> None:
    for one in run(2, "fault_cases.py", "memory", "0", "arena", options={"arena_bytes": "64M"}):
        assert report(one)["error"] == "UsageError"


@pytest.mark.slow
def test_a_small_dev_shm_is_enough(tmp_path: Path) -> None:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=64M", "none", "/dev/shm"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("no mount namespaces here: a 64 MB /dev/shm is not tested")
    shell = 'mount -t tmpfs -o size=64M none /dev/shm && exec "$@"'
    for one in run(2, "fault_cases.py", "memory", prefix=["unshare", "-m", "sh", "-c", shell, "sh"]):
        sums = report(one, "sums")
        assert (sums["x"], sums["y"]) == (2, 2) and sums["shm"] <= 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize(("size", "prefix"), [(4, ["taskset", "-c", "0"]), (8, [])])
def test_more_ranks_than_cores(size: int, prefix: list[str]) -> None:
    if prefix and shutil.which(prefix[0]) is None:
        pytest.skip(f"{prefix[0]} is not installed: ranks on one core are not tested")
    run(size, "collective_cases.py", "sizes,async", "5", prefix=prefix)
