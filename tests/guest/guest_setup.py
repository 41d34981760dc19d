"""Owns preparing a machine for guests: `python guest_setup.py`, or `make guest`. Done once, it takes under a second.

Everything but the system's own packages goes into one folder (see guest_files), and manifest.json there says what of.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import guest_kernel
import guest_python
from guest_files import ROOT, GuestError, folder, lock, sha256

EMULATOR: Final = "qemu-system-x86_64"


@dataclass(frozen=True)
class Manifest:
    """What the folder was prepared with."""

    kernel: str
    """Name of the unpacked kernel's folder."""
    kernel_packages: dict[str, str]
    kernel_sha256: str
    initramfs_sha256: str
    recipe: str
    packages: dict[str, str]
    """The system's packages that guests use, and their versions."""

    @property
    def kernel_folder(self) -> Path:
        """The unpacked kernel."""
        return folder() / self.kernel


def initramfs() -> Path:
    """The guest's first file system."""
    return folder() / "initramfs.gz"


def _listed() -> list[str]:
    """The packages that scripts/system-packages installs for guests."""
    script = (ROOT / "scripts/system-packages").read_text()
    found = re.search(r"^guest_packages=\(([^)]*)\)", script, flags=re.MULTILINE)
    assert found, "scripts/system-packages lists guest_packages=(…)"
    return found[1].split()


def _installed() -> dict[str, str]:
    names = _listed()
    if shutil.which("dpkg-query") is None:
        raise GuestError("guests are made from the packages of Debian or Ubuntu, and there is no dpkg here")
    form = "${Package} ${db:Status-Status} ${Version}\n"
    said = subprocess.run(["dpkg-query", "-W", "-f", form, *names], capture_output=True, text=True, check=False).stdout
    rows = [line.split() for line in said.splitlines()]
    return {row[0]: row[2] for row in rows if len(row) == 3 and row[1] == "installed"}


def _read() -> Manifest | None:
    try:
        values: dict[str, Any] = json.loads((folder() / "manifest.json").read_text())
        return Manifest(**values)
    except (OSError, ValueError, TypeError):
        return None


def _mismatch(manifest: Manifest | None) -> str:
    """What keeps the folder from being used as it is; "" for nothing."""
    if manifest is None:
        return f"nothing is prepared in {folder()}"
    installed = _installed()
    if missing := sorted(set(_listed()) - set(installed)):
        return f"packages are missing: {' '.join(missing)}"
    if manifest.packages != installed:
        return "packages have changed"
    if manifest.recipe != guest_kernel.recipe():
        return "how the first file system is built has changed"
    try:
        if sha256(guest_kernel.image(manifest.kernel_folder)) != manifest.kernel_sha256:
            return "the kernel has changed"
        if sha256(initramfs()) != manifest.initramfs_sha256:
            return "the first file system has changed"
    except (OSError, ValueError):
        return "files are missing"
    return ""


def _machine() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"guests run on Linux on x86_64, not on {sys.platform} on {platform.machine()}"
    return ""


def unavailable() -> str:
    """Why no guest can run here, "" when it can. Quick, and changes nothing."""
    try:
        reason = _machine() or _mismatch(_read())
        if not reason:
            guest_python.interpreter()
    except GuestError as error:
        reason = str(error)
    return reason and f"no emulated guest: {reason} (make guest prepares it)"


def manifest() -> Manifest:
    """What guests are made of.

    Raises:
        GuestError: nothing that fits is prepared.
    """
    found = _read()
    if reason := _machine() or _mismatch(found):
        raise GuestError(f"{reason} (make guest prepares it)")
    assert found is not None
    return found


def prepare() -> Manifest:
    """Fetches and builds what is missing; two processes may do it at the same time.

    Raises:
        GuestError: it cannot be had here.
    """
    if reason := _machine():
        raise GuestError(reason)
    with lock("prepare"):
        if set(_listed()) - set(_installed()):
            subprocess.run([str(ROOT / "scripts/system-packages"), "guest"], check=False)
            if missing := sorted(set(_listed()) - set(_installed())):
                raise GuestError(f"packages are missing: {' '.join(missing)}")
        found = _read()
        if found is None or _mismatch(found):
            found = _build(found)
        guest_python.prepare()
    return found


def _build(old: Manifest | None) -> Manifest:
    kernel, versions = _kernel_of(old)
    guest_kernel.build_initramfs(kernel, initramfs())
    made = Manifest(
        kernel=kernel.name,
        kernel_packages=versions,
        kernel_sha256=sha256(guest_kernel.image(kernel)),
        initramfs_sha256=sha256(initramfs()),
        recipe=guest_kernel.recipe(),
        packages=_installed(),
    )
    part = folder() / "manifest.json.part"
    part.write_text(json.dumps(asdict(made), indent=2) + "\n")
    part.replace(folder() / "manifest.json")
    for stale in folder().glob("kernel-*"):
        if stale != kernel:
            shutil.rmtree(stale, ignore_errors=True)
    return made


def _kernel_of(old: Manifest | None) -> tuple[Path, dict[str, str]]:
    """The kernel that is there, where it is what the manifest says, else a new one."""
    if old is not None:
        try:
            if sha256(guest_kernel.image(old.kernel_folder)) == old.kernel_sha256:
                return old.kernel_folder, old.kernel_packages
        except (OSError, ValueError):
            pass
    print("guest: fetching a kernel", file=sys.stderr)
    return guest_kernel.fetch(folder())


def main() -> int:
    """Prepares, and says what there is; with --state, only says it."""
    start_s = time.monotonic()
    if "--state" in sys.argv[1:]:
        reason = unavailable()
        print(reason or f"guest: {manifest().kernel}, {': '.join(map(str, guest_python.interpreter()))}")
        return 0
    try:
        made = prepare()
        note = guest_python.interpreter()[1]
    except GuestError as error:
        print(f"guest: cannot be prepared: {error}", file=sys.stderr)
        return 1
    print(f"guest: {made.kernel} in {folder()}; {note} ({time.monotonic() - start_s:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
