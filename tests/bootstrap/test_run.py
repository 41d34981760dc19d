"""Owns the tests of `gfkernels run` with real processes: output, exit codes, signals, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from gfkernels.cli.run import command_line, rank_environment

_MAIN = """
import sys, typer
sys.path[:0] = {path!r}
from gfkernels.cli.run import CONTEXT_SETTINGS, run_command
app = typer.Typer()
app.command("run", context_settings=CONTEXT_SETTINGS)(run_command)
app.command("other")(lambda: None)
app()
"""


class Launcher:
    """Runs `gfkernels run` in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text("import os, signal, subprocess, sys, time\n" + textwrap.dedent(text))
        return str(path)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        main = _MAIN.format(path=[path for path in sys.path if path])
        process = subprocess.Popen(
            [sys.executable, "-c", main, "run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
        )
        self._started.append(process)
        return process

    def __call__(self, *arguments: str) -> tuple[int, list[str], str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=30)
        return process.returncode, sorted(out.splitlines()), err

    def pids(self, count: int) -> list[int]:
        """Process ids that ranks wrote as files named pid.*"""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            files = list(self.folder.glob("pid.*"))
            if len(files) == count and all(file.read_text() for file in files):
                return [int(file.read_text()) for file in files]
            time.sleep(0.02)
        raise AssertionError("the ranks did not start")

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PID = "open(f'pid.{os.environ[\"RANK\"]}', 'w').write(str(os.getpid()))\n"


@pytest.mark.slow
def test_output_is_marked_and_arguments_are_passed_on(run: Launcher) -> None:
    script = run.script(
        """
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR".split()
        print(*[os.environ[name] for name in names], sys.argv[1:])
        print("no newline", end="", file=sys.stderr)
        """
    )
    code, out, err = run("-n", "2", script, "-n", "9", "--", "--help")
    assert code == 0, err
    tail = "['-n', '9', '--', '--help']"
    assert out == [f"[0] 0 2 0 2 127.0.0.1 {tail}", f"[1] 1 2 1 2 127.0.0.1 {tail}"]
    assert sorted(err.splitlines()) == ["[0] no newline", "[1] no newline"]


@pytest.mark.slow
def test_plain_output_modules_and_dashes(run: Launcher) -> None:
    run.script("print('module', sys.argv[1:])", "some_module.py")
    assert run("-n", "2", "--no-tag-output", "-m", "some_module", "-x") == (0, ["module ['-x']"] * 2, "")
    assert run("-n", "1", "--", run.script("print('s')"))[1] == ["[0] s"]
    assert run("-n", "1", "echo", "a", "program")[1] == ["[0] a program"]


@pytest.mark.slow
def test_bind_cores(run: Launcher) -> None:
    cores = sorted(os.sched_getaffinity(0))
    code, out, _ = run("-n", "2", "--bind-cores", run.script("print(sorted(os.sched_getaffinity(0)))"))
    halves = [cores[: len(cores) // 2], cores[len(cores) // 2 :]] if len(cores) > 1 else [cores, cores]
    assert code == 0 and out == [f"[{rank}] {half}" for rank, half in enumerate(halves)]


@pytest.mark.slow
def test_the_first_failure_ends_the_job(run: Launcher) -> None:
    script = run.script(
        """
        rank = os.environ["RANK"]
        signal.signal(signal.SIGTERM, lambda *_: (print("asked", flush=True), sys.exit(9)))
        open(f"ready.{rank}", "w").close()
        while not all(os.path.exists(f"ready.{r}") for r in range(3)): time.sleep(0.01)
        if rank == "1": sys.exit(7)
        time.sleep(30)
        """
    )
    begin = time.monotonic()
    code, out, err = run("-n", "3", script)
    assert code == 7 and out == ["[0] asked", "[2] asked"] and "rank 1 failed with exit code 7" in err
    assert time.monotonic() - begin < 20


def test_a_rank_ended_by_a_signal(run: Launcher) -> None:
    code, _, err = run("-n", "1", run.script("os.kill(os.getpid(), signal.SIGSEGV)"))
    assert code == 128 + signal.SIGSEGV and "rank 0 was ended by SIGSEGV" in err


@pytest.mark.slow
def test_timeout(run: Launcher) -> None:
    code, _, err = run("-n", "2", "--timeout", "0.5", run.script("time.sleep(30)"))
    assert code == 124 and "still running: rank 0, 1" in err


@pytest.mark.slow
def test_a_stubborn_or_stopped_rank_is_killed(run: Launcher) -> None:
    script = run.script(
        PID + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(60)"
    )
    process = run.start("-n", "2", "--timeout", "0.5", script)
    pids = run.pids(2)
    assert process.wait(15) == 124
    assert not any(map(_alive, pids))


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.slow
def test_signals_are_passed_on(run: Launcher, number: signal.Signals, expected: int) -> None:
    script = run.script(
        f"signal.signal({int(number)}, lambda *_: (print('got it', flush=True), sys.exit(0)))\n"
        + PID
        + "time.sleep(60)"
    )
    process = run.start("-n", "2", script)
    run.pids(2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == expected and sorted(out.splitlines()) == ["[0] got it", "[1] got it"]


def test_killing_the_launcher_leaves_nothing_behind(run: Launcher, eventually: Callable[..., None]) -> None:
    process = run.start("-n", "2", run.script(PID + "time.sleep(60)"))
    pids = run.pids(2)
    process.kill()
    eventually(lambda: not any(map(_alive, pids)))


@pytest.mark.slow
def test_children_of_ranks_end_with_them(run: Launcher) -> None:
    script = run.script("child = subprocess.Popen(['sleep', '60'])\nopen('pid.child', 'w').write(str(child.pid))")
    code, _, err = run("-n", "1", script)
    assert code == 0, err
    assert not any(map(_alive, run.pids(1)))


def test_ranks_meet(run: Launcher) -> None:
    script = run.script(
        f"""
        sys.path[:0] = {[path for path in sys.path if path]!r}
        from gfkernels.bootstrap import connect, discover
        from gfkernels.config import Config
        config = Config.load({{}}, os.environ)
        world = discover(os.environ, job_id=config.job_id)
        session = connect(world, config)
        print(session.store.gather("g", world.rank, world.size, world.rank), session.job_id[:4])
        session.store.barrier("end", world.rank, world.size)
        session.close()
        """
    )
    code, out, err = run("-n", "3", script)
    assert code == 0, err
    assert out == [f"[{rank}] [0, 1, 2] run-" for rank in range(3)]


def test_command_lines(tmp_path: Path) -> None:
    assert command_line(["x.py", "-a"], False) == [sys.executable, "x.py", "-a"]
    assert command_line(["pkg.mod", "-a"], True) == [sys.executable, "-m", "pkg.mod", "-a"]
    plain = tmp_path / "script"
    plain.write_text("")
    assert command_line([str(plain)], False) == [sys.executable, str(plain)]
    with pytest.raises(typer.BadParameter, match="no-such-thing"):
        command_line(["no-such-thing"], False)


def test_every_job_has_its_own_secret() -> None:
    first, second = rank_environment({"A": "b"}, 4), rank_environment({}, 4)
    assert first["A"] == "b" and first["WORLD_SIZE"] == "4"
    assert first["GFKERNELS_SECRET"] != second["GFKERNELS_SECRET"]
    assert first["GFKERNELS_JOB_ID"] != second["GFKERNELS_JOB_ID"]
