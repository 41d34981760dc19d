"""Owns the guests' caches of compiled code: filled by the host, kept between boots, never shared by two guests.

Compiling all of gfkernels takes half a minute here and ten in a guest, so the host compiles for the guest's CPU.
numba's cache is safe with one writer, but two writers that know nothing of each other can leave an index that names the
other's code: there are numbered folders, each locked by the guest that uses it, and one that only the host writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import guest_python
from guest_files import ROOT, GuestError, folder, lock, take_lock

_MOST = 64
_STAMP = "stamp"
_WARM_UP = ROOT / "tests/warm_up.py"
_SAMPLE = ROOT / "tests/guest/verbs/guest_collectives.py"


@dataclass(frozen=True)
class Slot:
    """A cache folder that is ours until it is released."""

    path: Path
    handle: int

    def release(self) -> None:
        """Lets others use it."""
        os.close(self.handle)


def take_slot() -> Slot:
    """The first cache folder that no running guest uses."""
    for number in range(_MOST):
        try:
            handle = take_lock(f"jit-{number}", timeout_s=0)
        except GuestError:
            continue
        path = folder() / f"jit-{number}"
        path.mkdir(mode=0o700, exist_ok=True)
        return Slot(path, handle)
    raise GuestError(f"{_MOST} guests are running")


def fill(slot: Slot, emulator: str, ask_cpu: Callable[[], tuple[str, str]]) -> None:
    """Puts the compiled code of the present sources into a guest's folder, compiling it here if that was not done yet.

    Args:
        slot: the folder; what is in it for other sources is removed.
        emulator: the emulator's version, which decides on the guest's CPU.
        ask_cpu: asks the guest for the CPU name and features that numba compiles for there.

    Raises:
        GuestError: compiling failed, such as on a CPU that lacks what the guest's has.
    """
    cpu = _cpu(emulator, ask_cpu)
    stamp = _stamp(cpu)
    if _read(slot.path / _STAMP) == stamp:
        return
    with lock("jit-host"):
        host = folder() / "jit-host"
        if _read(host / _STAMP) != stamp:
            shutil.rmtree(host, ignore_errors=True)
            host.mkdir(mode=0o700)
            _compile(host, cpu)
            (host / _STAMP).write_text(stamp)
        for old in slot.path.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        shutil.copytree(host, slot.path, dirs_exist_ok=True)


def _cpu(emulator: str, ask_cpu: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    python = str(guest_python.interpreter()[0])
    path = folder() / f"cpu-{hashlib.sha256(f'{emulator} {python}'.encode()).hexdigest()[:12]}.json"
    try:
        name, features = json.loads(path.read_text())
    except (OSError, ValueError):
        name, features = ask_cpu()
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps([name, features]))
        part.replace(path)
    return name, features


def _compile(into: Path, cpu: tuple[str, str]) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GFKERNELS_", "NUMBA_"))}
    env |= {"GFKERNELS_CACHE_DIR": str(into), "NUMBA_CPU_NAME": cpu[0], "NUMBA_CPU_FEATURES": cpu[1]}
    env["PYTHONPATH"] = str(ROOT)
    python = str(guest_python.interpreter()[0])
    for command in (
        [python, "-m", "gfkernels", "run", "-n", "2", "--timeout", "300", str(_WARM_UP)],
        [python, str(_SAMPLE), "warm_up"],
    ):
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise GuestError(f"compiling here for the guest's CPU failed:\n{(done.stdout + done.stderr)[-2000:]}")


def _stamp(cpu: tuple[str, str]) -> str:
    # numba looks at the sources' times and sizes, so that is what the code is compiled for.
    digest = hashlib.sha256(repr((cpu, str(ROOT), str(guest_python.interpreter()[0]))).encode())
    for name in ("gfkernels", "transport", "bindings"):
        for path in sorted((ROOT / name).rglob("*.py")):
            info = path.stat()
            digest.update(f"{path} {info.st_mtime_ns} {info.st_size}\n".encode())
    return digest.hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
