"""Owns emulated guests: machines with Soft-RoCE that boot once, run many commands, and never outlive their owner.

    with Guest() as guest:
        print(guest.run("ibv_devinfo").output)

The guest's root is the host's, read-only, under a layer of memory; what it writes is gone with it, except in the
exchange folder (`guest.exchange` here, `/exchange` there) and in the cache of compiled code (`/jit` there). Files of
the host that change after the boot may look stale in the guest: hand them over in the exchange folder.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import guest_jit
import guest_kernel
import guest_python
import guest_setup
from guest_command import Finished, Running
from guest_files import HERE, ROOT, GuestError, folder
from guest_wire import Wire

EXCHANGE: Final = Path("/exchange")
"""The exchange folder's path in the guest."""
JIT: Final = Path("/jit")
_PORT: Final = "gfkernels.agent"
# KVM is refused even where it is there: it may open and then hang, and results would depend on the machine.
_MACHINE: Final = "-accel tcg,thread=multi,tb-size=512 -cpu max,la57=off -M q35 -nodefaults -no-user-config"
_DISPLAY: Final = "-display none -no-reboot -device virtio-rng-pci -device virtio-serial-pci -nic none"
_KERNEL: Final = (
    "console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on net.ifnames=0 tsc=reliable nokaslr "
    "rcupdate.rcu_expedited=1 audit=0"
)
_OFF_S: Final = 15.0
_LATE_S: Final = 60.0
"""How much later than its time-out a command may end before the guest counts as hung."""


class Guest:
    """One guest. Its methods may be called from any thread; commands may run at the same time."""

    def __init__(
        self,
        *,
        n_cpus: int = 2,
        memory_mib: int = 2048,
        ident: int = 0,
        wire: Wire | None = None,
        n_rails: int = 1,
        boot_timeout_s: float = 240,
    ) -> None:
        """Says what the guest will be; it is started by `start` or by `with`.

        Args:
            n_cpus: emulated cores, each a thread of the host.
            memory_mib: the guest's memory. Two thirds of it may be files that it writes.
            ident: 0 or 1; its addresses are 10.77.RAIL.(ident + 1), its name is guest0 or guest1.
            wire: what eth0 and so on are plugged into; None: they are dummies, and only the guest itself is there.
            n_rails: devices (rxe0 on eth0, rxe1 on eth1…) of a guest without a wire; a wire brings its own number.
            boot_timeout_s: 10 to 20 s are usual; more where the host is busy.
        """
        self.n_cpus, self.memory_mib, self.ident, self.wire = n_cpus, memory_mib, ident, wire
        self.n_rails = wire.n_rails if wire is not None else n_rails
        self.boot_s = 0.0
        self.exchange = Path()
        """The exchange folder's path here; removed when the guest is closed."""
        self._boot_timeout_s = boot_timeout_s
        self._lock = threading.Lock()
        self._running: dict[int, Running] = {}
        self._count = 0
        self._up = threading.Event()
        self._gone = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._slot: guest_jit.Slot | None = None

    def __enter__(self) -> Guest:
        self.start_up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._end()

    def start_up(self) -> None:
        """Boots, and returns when commands can run.

        Raises:
            GuestError: it did not come up, with the end of its console.
        """
        begin_s = time.monotonic()
        try:
            self._launch()
            while not self._up.wait(0.5):
                if self._gone.is_set() or time.monotonic() - begin_s > self._boot_timeout_s:
                    what = "ended while it booted" if self._gone.is_set() else "did not come up in time"
                    raise GuestError(f"guest{self.ident} {what}:\n{self.console()[-3000:]}")
        except BaseException:
            self._end()
            raise
        self.boot_s = time.monotonic() - begin_s

    @property
    def alive(self) -> bool:
        """Whether commands can run."""
        return self._up.is_set() and not self._gone.is_set()

    def run(
        self,
        command: str | Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = EXCHANGE,
        timeout_s: float = 60,
    ) -> Finished:
        """Runs a command and waits for its end; see `start`."""
        return self.start(command, env=env, cwd=cwd, timeout_s=timeout_s).wait()

    def python(
        self, *arguments: str | os.PathLike[str], env: Mapping[str, str] | None = None, timeout_s: float = 120
    ) -> Finished:
        """Runs the interpreter that has pyverbs, and sees gfkernels, with these arguments."""
        return self.run([guest_python.interpreter()[0], *arguments], env=env, timeout_s=timeout_s)

    def start(
        self,
        command: str | Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] = EXCHANGE,
        timeout_s: float = 60,
    ) -> Running:
        """Starts a command as root.

        When it ends, everything that it has started and left behind is killed.

        Args:
            command: a line for bash, or a program and its arguments.
            env: added to the guest's own environment, in which PYTHONPATH has pyverbs and this checkout.
            cwd: a folder of the guest.
            timeout_s: after this it is killed, with all it has started; the guest goes on.

        Raises:
            GuestError: the guest is gone.
        """
        argv = ["/bin/bash", "-c", command] if isinstance(command, str) else [os.fspath(part) for part in command]
        with self._lock:
            self._count += 1
            number = self._count
            output = f".guest/{number}.out"
            running = Running(self, number, self.exchange / output, timeout_s + _LATE_S)
            self._running[number] = running
        environ = {**self._environment(), **(env or {})}
        try:
            self._say(
                id=number,
                argv=argv,
                env=environ,
                cwd=os.fspath(cwd),
                timeout_s=timeout_s,
                output=str(EXCHANGE / output),
            )
        except GuestError:
            del self._running[number]
            raise
        if self._gone.is_set():
            running.lost()
        return running

    def kill(self) -> None:
        """The whole guest dies at once, as when its power fails. Commands under way raise GuestError."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()  # the leash's: it kills the emulator, and waits for it
            self._process.wait()
        self._gone.wait(_OFF_S)

    def close(self) -> None:
        """Switches the guest off, and removes its exchange folder. May be called again."""
        if self.alive:
            with suppress(GuestError):
                self._say(off=True)
            self._gone.wait(_OFF_S)
        self._end()

    def console(self) -> str:
        """What the kernel, the guest's start, and the emulator have said."""
        parts = []
        for name in ("console.log", "emulator.log"):
            with suppress(OSError):
                parts.append((self.exchange / ".guest" / name).read_text(errors="replace"))
        return "".join(parts)

    def precompile(self) -> None:
        """Fills the guest's cache of compiled code from here, twenty times as fast as there; quick when it is full.

        To be called before anything in the guest imports gfkernels.
        """
        assert self._slot is not None
        emulator = guest_setup.manifest().packages["qemu-system-x86"]
        guest_jit.fill(self._slot, emulator, self._ask_cpu)
        if self._cache() != JIT:
            self.run(f"mkdir -p -m 700 {self._cache()} && cp -r {JIT}/. {self._cache()}").check()

    def _ask_cpu(self) -> tuple[str, str]:
        code = "import json; from gfkernels.native import jit; print(json.dumps(jit.target_cpu()))"
        name, features = json.loads(self.python("-c", code).check().splitlines()[-1])
        return name, features

    def _cache(self) -> Path:
        # A share's files belong to whoever runs the emulator, and gfkernels refuses a cache of another user than its
        # own, which is root there. Where that is not root here, the cache lives in the guest's memory.
        return JIT if os.getuid() == 0 else Path("/run/jit")

    def stop_command(self, number: int) -> None:
        """Kills one command; used by `Running.kill`."""
        self._say(kill=number)

    def _environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": f"{ROOT}:{guest_python.pyverbs_path()}",
            "GFKERNELS_CACHE_DIR": str(self._cache()),
            "GUEST": str(self.ident),
            "EXCHANGE": str(EXCHANGE),
        }

    def _launch(self) -> None:
        made = guest_setup.manifest()
        self._slot = guest_jit.take_slot()
        self.exchange = _new_exchange()
        control = self.exchange / ".guest"
        control.mkdir()
        shutil.copy(HERE / "guest-init.sh", control / "init.sh")
        shutil.copy(HERE / "guest_agent.py", control / "agent.py")
        settings = {
            "ident": self.ident,
            "wired": int(self.wire is not None),
            "mtu": self.wire.mtu if self.wire is not None else 1500,
            "n_rails": self.n_rails,
            "modules": guest_kernel.modules(made.kernel_folder),
            "python": guest_python.SYSTEM_PYTHON,
            "port": _PORT,
        }
        lines = [f"{name}={shlex.quote(str(value))}\n" for name, value in settings.items()]
        (control / "settings.sh").write_text("".join(lines))

        ours, theirs = socket.socketpair()
        ends = self.wire.take(self.ident) if self.wire is not None else []
        try:
            command = self._command(made, theirs, ends)
            leash = [sys.executable, "-I", "-S", str(HERE / "guest_leash.py"), str(os.getpid())]
            with open(control / "emulator.log", "wb") as log:
                self._process = subprocess.Popen(
                    [*leash, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno(), *(end.fileno() for end in ends)],
                    start_new_session=True,  # Ctrl-C is for the tests; they end the guest
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for end in ends:
                end.close()
        self._channel = ours
        self._reader = threading.Thread(target=self._read, args=(ours,), name=f"guest{self.ident}", daemon=True)
        self._reader.start()

    def _command(self, made: guest_setup.Manifest, agent: socket.socket, ends: Sequence[socket.socket]) -> list[str]:
        assert self._slot is not None
        command = [guest_setup.EMULATOR, *_MACHINE.split(), *_DISPLAY.split()]
        command += ["-smp", str(self.n_cpus), "-m", str(self.memory_mib)]
        command += ["-kernel", str(guest_kernel.image(made.kernel_folder)), "-initrd", str(guest_setup.initramfs())]
        command += ["-append", _KERNEL]
        console = _quoted(self.exchange / ".guest/console.log")
        command += ["-chardev", f"file,id=console,path={console}", "-serial", "chardev:console"]
        command += ["-chardev", f"socket,id=agent,fd={agent.fileno()}"]
        command += ["-device", f"virtserialport,chardev=agent,name={_PORT}"]
        shares = (
            ("root", Path("/"), ",readonly=on,multidevs=remap"),
            ("exchange", self.exchange, ""),
            ("jit", self._slot.path, ""),
        )
        for tag, path, options in shares:
            command += ["-fsdev", f"local,id={tag},path={_quoted(path)},security_model=none{options}"]
            command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        for rail, end in enumerate(ends):
            mac = f"52:54:00:77:{rail:02x}:{self.ident:02x}"
            command += ["-netdev", f"socket,id=wire{rail},fd={end.fileno()}"]
            command += ["-device", f"virtio-net-pci,netdev=wire{rail},romfile=,mac={mac}"]
        return command

    def _say(self, **message: Any) -> None:
        with self._lock:
            try:
                if self._gone.is_set() or self._channel is None:
                    raise OSError("it is not running")
                self._channel.sendall(json.dumps(message).encode() + b"\n")
            except OSError as error:
                raise GuestError(f"guest{self.ident} is gone: {error}") from error

    def _read(self, channel: socket.socket) -> None:
        """The reader's thread: hands out what the agent says, until the emulator is gone."""
        pending = b""
        while True:
            try:
                data = channel.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "up" in message:
                    self._up.set()
                elif running := self._running.pop(message["id"], None):
                    running.finish(message["code"], message["timed_out"])
        self._gone.set()
        for running in list(self._running.values()):
            running.lost()

    def _end(self) -> None:
        self.kill()
        if self._reader is not None:
            self._reader.join(_OFF_S)
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._slot is not None:
            self._slot.release()
            self._slot = None
        if self.exchange != Path():
            shutil.rmtree(self.exchange, ignore_errors=True)


@contextmanager
def booted_pair(
    *, n_cpus: int = 1, memory_mib: int = 2048, mtu: int = 1500, n_rails: int = 1
) -> Iterator[tuple[Guest, Guest]]:
    """Two guests on one wire, booted at the same time; `Guest` and `Wire` explain the arguments."""
    with Wire(mtu=mtu, n_rails=n_rails) as wire, ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        first, second = (Guest(n_cpus=n_cpus, memory_mib=memory_mib, ident=i, wire=wire) for i in (0, 1))
        for guest in (first, second):
            stack.callback(guest.close)
        for booted in [pool.submit(guest.start_up) for guest in (first, second)]:
            booted.result()
        yield first, second


def _quoted(path: Path) -> str:
    return str(path).replace(",", ",,")


def _new_exchange() -> Path:
    """An empty exchange folder; those that killed tests left behind are removed."""
    shares = folder() / "exchange"
    shares.mkdir(exist_ok=True)
    for old in shares.iterdir():
        owner = old.name.partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(dir=shares, prefix=f"{os.getpid()}-"))
