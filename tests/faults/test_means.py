"""Too little memory, too few cores, ranks set up differently: an error that says so, or slower, never a hang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_world import ROOT, World

pytestmark = pytest.mark.faults


def test_a_full_arena_is_an_error_of_the_call_that_asked(start: Callable[..., World]) -> None:
    world = start("fault_means:tiny_arena", size=2, arena_bytes="64M", timeout_s=30)
    for what in ("call", "filled"):
        for one in world.reports(what):
            assert one["error"] == "UsageError" and "arena" in one["message"], one
    assert all(one["clean"] for one in world.reports("sum"))
    world.end()


@pytest.mark.slow
def test_a_small_dev_shm_is_enough(tmp_path: Path) -> None:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=64M", "none", "/dev/shm"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("no mount namespaces here (unshare -m needs root): a 64 MB /dev/shm is not tested")
    script = Path(__file__).with_name("fault_means.py")
    command = [sys.executable, "-m", "gfkernels", "run", "-n", "2", "--timeout", "150", str(script)]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64M none /dev/shm && exec "$@"', "sh", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{script.parent}"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '"wrong"' in line]
    assert [one["wrong"] for one in found] == [0, 0], done.stdout
    assert all(one["shm"] <= 64 << 20 for one in found), "the fault was not hit"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "n_cores"), [(4, 1), (8, 2)])
@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_more_ranks_than_cores(start: Callable[..., World], way: str, size: int, n_cores: int) -> None:
    cores = sorted(os.sched_getaffinity(0))[:n_cores]
    world = start("fault_means:crowd", cores, size=size, transport=way, timeout_s=60)
    assert all(one["cores"] == cores for one in world.reports("cores"))
    world.end()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", "2"),
        pytest.param("secret", "secret", marks=pytest.mark.slow),
        pytest.param("size", "4", marks=pytest.mark.slow),
        pytest.param("rank", "missing rank", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_ranks_that_do_not_match(start: Callable[..., World], what: str, words: str) -> None:
    connect_timeout_s = 4.0
    world = start("fault_means:strangers", what, connect_timeout_s=connect_timeout_s)
    there = [0, 1] if what == "missing" else list(world.all())
    found = world.reports("call", there)
    for one in found:
        assert {"BootstrapError", "ConfigError"} & set(one["kinds"]), found
        assert one["seconds"] < 3 * connect_timeout_s, one
    named = found if what == "missing" else [found[1]]
    assert all(words in one["message"] for one in named), named
    assert not any(one["initialized"] for one in world.reports("state", there))
    world.tell("end")
    world.end()
