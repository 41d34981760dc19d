"""Owns the tests of the testing helpers: real ranks answer, fail, hang and die, and are always gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gfkernels as gf
from gfkernels.testing import RankPool, RanksFailed, run_ranks


class Nested:
    """Functions may be a class's."""

    @staticmethod
    def double(x: int) -> int:
        return 2 * x


def total(start: float, count: int) -> tuple[int, Any]:
    comm = gf.init()
    return comm.rank, gf.allreduce(np.full(count, start + comm.rank))


def settings() -> tuple[str, str, int]:
    return os.environ["COLOUR"], gf.init().transport, os.getpid()


def fail_on_one() -> None:
    comm = gf.init()
    if comm.rank == 1:
        print("these are my last words")
        raise gf.PeerLostError("it is rank 7", 7)
    gf.allreduce(np.ones(5))


def hang(child: str) -> None:
    if gf.init().rank == 0:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(child).write_text(str(process.pid))
        time.sleep(600)


def die() -> None:
    if gf.init().rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    gf.barrier()


def big(data: bytes) -> bytes:
    return data[::-1]


def unreadable() -> Any:
    raise _Awkward(1, 2)


class _Awkward(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b} make three")


def no_pickle() -> Any:
    return lambda: 1


def linger() -> None:
    import atexit

    atexit.register(os._exit, 9)


def pid() -> int:
    return os.getpid()


def _is_gone(process: int) -> bool:
    """Ended, maybe waiting for init to collect it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def _wait_until_gone(process: int) -> None:
    deadline = time.monotonic() + 10
    while not _is_gone(process):
        assert time.monotonic() < deadline, f"process {process} is still there"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def pair() -> Any:
    """Two ranks for all tests that break nothing, or do not mind a fresh start."""
    pool = RankPool(2)
    yield pool
    pool.close()


def test_every_rank_answers(pair: RankPool) -> None:
    for start, count in ((1.0, 3), (0.5, 100_000)):
        for rank, (own, result) in enumerate(pair.run(total, start, count)):
            assert own == rank
            assert np.array_equal(result, np.full(count, 2 * start + 1))


def test_ranks_stay(pair: RankPool) -> None:
    first = pair.run(pid)
    assert first == pair.run(pid) == pair.pids and len(set(first)) == 2


def test_large_messages_and_other_functions(pair: RankPool) -> None:
    data = os.urandom(5 << 20)
    assert pair.run(big, data) == [data[::-1]] * 2
    assert pair.run(Nested.double, 4) == [8, 8]
    assert pair.run(os.path.basename, "a/b") == ["b", "b"]


@pytest.mark.slow
def test_a_failure_names_ranks_and_shows_their_output(pair: RankPool) -> None:
    before = pair.run(pid)
    with pytest.raises(RanksFailed) as caught:
        pair.run(fail_on_one)
    message, outcomes = str(caught.value), caught.value.outcomes
    assert "fail_on_one on 2 ranks" in message and "it is rank 7" in message and "in fail_on_one" in message
    assert "these are my last words" in outcomes[1].output
    assert isinstance(outcomes[1].error, gf.PeerLostError) and outcomes[1].error.rank == 7
    # The other one waited for it, and heard at once.
    assert isinstance(outcomes[0].error, gf.PeerLostError) and outcomes[0].error.rank == 1
    assert pair.pids == [] and all(map(_is_gone, before))
    assert not set(before) & set(pair.run(pid)), "a broken rank was used again"


@pytest.mark.slow
def test_what_hangs_is_shown_and_killed_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "child"
    started = time.monotonic()
    pool = RankPool(2)
    pool.run(pid)
    with pytest.raises(RanksFailed) as caught:
        pool.run(hang, str(file), timeout=4)
    assert time.monotonic() - started < 60
    slow, quick = caught.value.outcomes
    assert isinstance(slow.error, TimeoutError) and quick.error is None
    assert "in hang" in slow.output, "nothing shows where it hung"
    _wait_until_gone(int(file.read_text()))


def test_a_rank_that_dies_is_reported(pair: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        pair.run(die)
    assert "was ended by SIGKILL" in str(caught.value)
    assert isinstance(caught.value.outcomes[1].error, gf.PeerLostError)


@pytest.mark.slow
def test_answers_that_cannot_travel(pair: RankPool) -> None:
    with pytest.raises(RanksFailed, match="1 and 2 make three"):
        pair.run(unreadable)
    with pytest.raises(RanksFailed, match="lambda"):
        pair.run(no_pickle)
    with pytest.raises(ValueError, match="top level"):
        pair.run(lambda: 1)


@pytest.mark.slow
def test_settings_reach_the_ranks() -> None:
    told = run_ranks(2, settings, env={"COLOUR": "green"}, options={"transport": "tcp"})
    assert [one[:2] for one in told] == [("green", "tcp")] * 2
    assert all(_is_gone(one[2]) for one in told)
    with pytest.raises(RanksFailed, match="did you mean GFKERNELS_TRANSPORT"):
        run_ranks(1, settings, env={"COLOUR": "x"}, options={"transprot": "tcp"})


def test_an_exit_that_goes_wrong_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="exited with status 9"):
        run_ranks(1, linger)


@pytest.mark.slow
def test_a_prefix_starts_the_interpreter() -> None:
    def prefix(rank: int) -> list[str]:
        return ["env", f"PLACE={rank}"]

    assert run_ranks(2, os.getenv, args=("PLACE",), prefix=prefix) == ["0", "1"]


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, time\n"
        "from gfkernels.testing import RankPool\n"
        "def stuck():\n    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool(2)\n"
        "    print(*pool.run(os.getpid), flush=True)\n"
        "    signal.alarm(1)\n"
        "    pool.run(stuck, timeout=600)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == -signal.SIGALRM, done.stderr
    processes = [int(word) for word in done.stdout.split()]
    assert len(processes) == 2
    for process in processes:
        _wait_until_gone(process)


def test_the_conformance_suite_is_public() -> None:
    from gfkernels.testing import conformance
    from gfkernels.transport import conformance as inner

    assert conformance.CHECKS is inner.CHECKS and conformance.Subject is inner.Subject
