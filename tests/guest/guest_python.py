"""Owns which interpreter guests run: the distribution's pyverbs works with one minor version of Python only."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

from guest_files import ROOT, GuestError, folder, lock

_DISTRIBUTION: Final = Path("/usr/lib/python3/dist-packages/pyverbs")
SYSTEM_PYTHON: Final = "/usr/bin/python3"


def pyverbs_path() -> Path:
    """A folder for PYTHONPATH that holds the distribution's pyverbs and nothing else of it; made where missing."""
    path = folder() / "pyverbs_path"
    path.mkdir(exist_ok=True)
    link = path / "pyverbs"
    if not link.is_symlink():
        link.symlink_to(_DISTRIBUTION)
    return path


def pyverbs_minor() -> str:
    """The version of Python that pyverbs was built for, such as "3.11".

    Raises:
        GuestError: it is not installed.
    """
    for library in sorted(_DISTRIBUTION.glob("device.cpython-*.so")):
        if found := re.match(r"device\.cpython-3(\d+)-", library.name):
            return f"3.{found[1]}"
    raise GuestError("pyverbs is not installed (package python3-pyverbs)")


def interpreter() -> tuple[Path, str]:
    """The interpreter for guests, and a note that says which it is and why.

    Raises:
        GuestError: there is none yet.
    """
    wanted = pyverbs_minor()
    ours = f"3.{sys.version_info.minor}"
    if ours == wanted:
        return Path(sys.executable), f"this environment's Python {ours}, which pyverbs was built for"
    path = _second(wanted)
    if not _stamp(path).exists():
        raise GuestError(f"pyverbs was built for Python {wanted}, this is {ours}, and {path} is not made")
    return path / "bin/python", f"a second environment, with the Python {wanted} that pyverbs was built for; not {ours}"


def prepare() -> str:
    """Makes what `interpreter` needs; its note."""
    pyverbs_path()
    wanted = pyverbs_minor()
    if f"3.{sys.version_info.minor}" != wanted and not _stamp(_second(wanted)).exists():
        with lock("python"):
            _make_second(wanted)
    return interpreter()[1]


def _second(wanted: str) -> Path:
    return folder() / f"venv-{wanted}"


def _requirements() -> list[str]:
    return [item for item in metadata.requires("gfkernels") or [] if "extra ==" not in item]


def _stamp(path: Path) -> Path:
    digest = hashlib.sha256("\n".join(_requirements()).encode()).hexdigest()[:12]
    return path / f"complete-{digest}"


def _make_second(wanted: str) -> None:
    path = _second(wanted)
    if _stamp(path).exists():
        return
    shutil.rmtree(path, ignore_errors=True)
    print(f"guest: making an environment with Python {wanted} for pyverbs", file=sys.stderr)
    # Says what is missing, or installs it; whether that helped shows when the environment is made.
    subprocess.run([str(ROOT / "scripts/system-packages"), "venv", SYSTEM_PYTHON], check=False)
    pip = [str(path / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += shlex.split(os.environ.get("PIP_ARGS", ""))
    for command in ([SYSTEM_PYTHON, "-m", "venv", str(path)], [*pip, *_requirements()]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()[-1000:]
            raise GuestError(f"an environment with Python {wanted} cannot be made: {said}")
    _stamp(path).touch()
