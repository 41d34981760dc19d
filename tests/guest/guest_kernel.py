"""Owns the guest's kernel and its first file system: fetched as the distribution's package, unpacked into a folder."""

from __future__ import annotations

import gzip
import lzma
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from guest_files import HERE, GuestError, sha256

META_PACKAGES: Final = ("linux-image-amd64", "linux-image-generic")
"""What names the newest stock kernel, on Debian and Ubuntu. The cloud kernels have neither Soft-RoCE nor 9p."""
NEEDED_MODULES: Final = ("rdma_rxe", "ib_uverbs", "rdma_ucm", "virtio_console", "virtio_net", "sch_netem", "dummy")
_EARLY_MODULES: Final = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_rng")
"""What mounting the root takes. All others are loaded from there."""


def run(argv: Sequence[str], cwd: Path | None = None) -> str:
    """Standard output of a program.

    Raises:
        GuestError: it failed, with what it said.
    """
    env = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise GuestError(f"{argv[0]} is not installed") from error
    if done.returncode != 0:
        raise GuestError(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()[-1000:]}")
    return done.stdout


def fetch(into: Path) -> tuple[Path, dict[str, str]]:
    """Fetches and unpacks the newest stock kernel; nothing is installed.

    Returns:
        The folder, with boot/ and lib/modules/ in it, and the versions of its packages.
    """
    # Lists of packages may be missing (fresh images) or older than what the archive still has: one try with new ones.
    try:
        return _fetch(into)
    except GuestError:
        if os.geteuid() != 0:
            raise
        run(["apt-get", "update", "-qq"])
        return _fetch(into)


def _fetch(into: Path) -> tuple[Path, dict[str, str]]:
    names = _packages()
    with tempfile.TemporaryDirectory(dir=into, prefix="fetch-") as temporary:
        work = Path(temporary)
        run(["apt-get", "download", "-qq", *names], cwd=work)
        versions = {}
        for package in sorted(work.glob("*.deb")):
            name, version = run(["dpkg-deb", "-W", "--showformat", "${Package} ${Version}", str(package)]).split()
            versions[name] = version
            run(["dpkg-deb", "-x", str(package), str(work / "kernel")])
        made = work / "kernel"
        # Where /lib is a link to /usr/lib, packages say usr/lib.
        if not (made / "lib/modules").exists():
            (made / "lib").mkdir(exist_ok=True)
            shutil.move(str(made / "usr/lib/modules"), str(made / "lib/modules"))
        (release,) = (path.name for path in (made / "lib/modules").iterdir())
        run(["depmod", "-b", str(made), release])
        for module in NEEDED_MODULES:
            run(["modprobe", "-d", str(made), "-S", release, "--show-depends", module])
        final = into / f"kernel-{release}"
        shutil.rmtree(final, ignore_errors=True)
        made.rename(final)
    return final, versions


def _packages() -> list[str]:
    for meta in META_PACKAGES:
        found = re.findall(r"^\s*Depends: (linux-image-\d\S+)", _ask_cache("depends", meta), flags=re.MULTILINE)
        if found:
            release = found[0].removeprefix("linux-image-")
            # Ubuntu splits modules off, and Soft-RoCE is in the second half of them.
            split = [f"linux-modules-{release}", f"linux-modules-extra-{release}"]
            return [found[0], *(name for name in split if _ask_cache("show", name))]
    raise GuestError(f"apt knows none of {', '.join(META_PACKAGES)}: apt-get update, or this is no Debian or Ubuntu")


def _ask_cache(question: str, name: str) -> str:
    try:
        return run(["apt-cache", question, name])
    except GuestError:
        return ""


def image(kernel: Path) -> Path:
    """The kernel image of an unpacked kernel."""
    (found,) = (kernel / "boot").glob("vmlinuz-*")
    return found


def modules(kernel: Path) -> Path:
    """Its lib/modules, to be bound to the guest's."""
    return kernel / "lib/modules"


def build_initramfs(kernel: Path, into: Path) -> None:
    """Writes the compressed first file system: a static busybox, the modules that mount the root, and the script."""
    busybox = Path(shutil.which("busybox") or "/bin/busybox")
    files: list[tuple[str, int, bytes]] = [
        (name, stat.S_IFDIR | 0o755, b"") for name in ("bin", "dev", "layer", "lower", "modules", "new", "proc", "sys")
    ]
    files.append(("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()))
    files.append(("init", stat.S_IFREG | 0o755, (HERE / "initramfs-init.sh").read_bytes()))
    for number, module in enumerate(_early_modules(kernel)):
        name = re.sub(r"\.(xz|zst|gz)$", "", module.name)
        files.append((f"modules/{number:03}-{name}", stat.S_IFREG | 0o644, _plain(module)))
    part = into.with_name(f"{into.name}.part")
    part.write_bytes(gzip.compress(b"".join(_cpio(files)), compresslevel=1, mtime=0))
    part.replace(into)


def _early_modules(kernel: Path) -> list[Path]:
    (release,) = (path.name for path in modules(kernel).iterdir())
    ordered: dict[Path, None] = {}
    for module in _EARLY_MODULES:
        said = run(["modprobe", "-d", str(kernel), "-S", release, "--show-depends", module])
        ordered.update((Path(path), None) for path in re.findall(r"^insmod (\S.*\S)\s*$", said, flags=re.MULTILINE))
    return list(ordered)


def _plain(module: Path) -> bytes:
    # busybox's insmod knows no compression.
    if module.suffix == ".xz":
        return lzma.decompress(module.read_bytes())
    if module.suffix == ".gz":
        return gzip.decompress(module.read_bytes())
    if module.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", str(module)], capture_output=True, check=True).stdout
    return module.read_bytes()


def _cpio(files: Sequence[tuple[str, int, bytes]]) -> Iterator[bytes]:
    """An archive as the kernel unpacks it ("newc"), the same bytes for the same files."""
    for number, (name, mode, data) in enumerate([*files, ("TRAILER!!!", 0, b"")], 1):
        links = 2 if stat.S_ISDIR(mode) else 1
        fields = (number, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        yield head + bytes(-len(head) % 4)
        yield data + bytes(-len(data) % 4)


def recipe() -> str:
    """Changes when the first file system has to be built anew."""
    return sha256(HERE / "initramfs-init.sh") + sha256(Path(__file__))
