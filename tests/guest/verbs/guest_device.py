"""In the guest: an opened device: memory it takes and refuses, limits, forks, and leaving without a word."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
from guest_rig import descriptors, main

from gfkernels.errors import UnavailableError, UsageError
from gfkernels.transport.verbs.compat import load
from gfkernels.transport.verbs.device import open_device
from gfkernels.transport.verbs.devices import choose
from gfkernels.transport.verbs.gpu_memory import probe_gpu_memory
from gfkernels.transport.verbs.settings import Settings
from gfkernels.transport.verbs.sysfs import scan

DEVICE = "rxe0"


def what_sysfs_tells() -> None:
    """The same as the library."""
    (card,) = scan()
    (port,) = card.ports
    (choice,) = choose([card], Settings())
    assert choice.gid is not None and choice.gid.address == "10.77.0.1" and port.interfaces == ("eth0",)
    (choice,) = choose([card], Settings(), [("eth0", "10.77.0.1")])
    assert "eth0" in choice.why
    device = open_device(DEVICE)
    attributes = device.context.query_port(1)
    gids = device.context.query_gid_table(attributes.gid_tbl_len)
    assert [(g.index, g.value) for g in port.gids] == [(g.gid_index, g.gid_str()) for g in gids]
    assert (int(attributes.state), port.state) == (4, "ACTIVE")
    device.close()
    print(port)


def memory() -> None:
    """Odd, overlapping and large spans are fine; read-only and unmapped ones are not."""
    before = descriptors()
    device = open_device(DEVICE)
    array = np.zeros(1 << 20, np.uint8)
    address = int(array.ctypes.data)
    held = [device.register(address + first, nbytes) for first, nbytes in ((0, 1 << 20), (3, 1), (4095, 5000))]
    assert len({one.rkey for one in held}) == 3
    read_only = mmap.mmap(-1, 8192, prot=mmap.PROT_READ)
    where = np.frombuffer(read_only, np.uint8).ctypes.data
    for bad in (int(where), 1 << 30):
        try:
            device.register(bad, 4096)
        except UsageError as error:
            print(error)
            assert "read-only, or not all of them are mapped" in str(error)
        else:
            raise AssertionError("registered")
    for one in held:
        one.close()
        one.close()
    assert device.regions._words[2] == 0
    device.close()
    assert descriptors() == before


def _as_nobody(part: Callable[[], None]) -> None:
    """Runs it in a fork of another user, with 64 KiB of locked memory."""
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
            os.setgid(65534)
            os.setuid(65534)
            part()
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _refusal(part: Callable[[], object]) -> str:
    try:
        part()
    except UnavailableError as error:
        print(error)
        return str(error)
    raise AssertionError("not refused")


def over_the_limit() -> None:
    """As another user: without permission, then with too low a limit of locked memory."""
    load()
    (path,) = Path("/dev/infiniband").glob("uverbs*")
    mode = path.stat().st_mode

    def denied() -> None:
        assert "user 65534 may not open" in _refusal(lambda: choose(scan(), Settings()))
        assert "cannot be opened" in _refusal(lambda: open_device(DEVICE))

    def limited() -> None:
        device = open_device(DEVICE)
        array = np.zeros(1 << 20, np.uint8)
        text = _refusal(lambda: device.register(int(array.ctypes.data), array.nbytes))
        assert "ulimit -l" in text and "65,536 bytes" in text
        device.close()

    try:
        path.chmod(0o600)
        _as_nobody(denied)
        path.chmod(0o666)
        _as_nobody(limited)
    finally:
        path.chmod(mode)


def leaving_without_a_word() -> None:
    """A program that closes nothing ends with nothing on stderr, and its root logger is its own."""
    code = (
        "import logging\n"
        "import numpy as np\n"
        "from gfkernels.transport.verbs.device import open_device\n"
        "from gfkernels.transport.verbs.queue_pair import QueuePair\n"
        f"device = open_device({DEVICE!r})\n"
        "array = np.zeros(1 << 16, np.uint8)\n"
        "one, cq = device.register(array.ctypes.data, array.nbytes), device.create_cq(16)\n"
        "pair = QueuePair(device, cq); pair.to_init(1); pair.post_receives(1, 8)\n"
        "assert not logging.getLogger().handlers and logging.getLogger().level == logging.WARNING\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", ""), done


def a_forked_child() -> None:
    """It ends in order, and its parent's objects still work."""
    device = open_device(DEVICE)
    array = np.zeros(5000, np.uint8)
    one = device.register(int(array.ctypes.data), array.nbytes)
    array[:] = 7
    pid = os.fork()
    if pid == 0:
        try:
            device.register(int(array.ctypes.data), array.nbytes)
        except UsageError:
            assert (array == 7).all()
            del one, device
            own = open_device(DEVICE)
            own.close()
            sys.exit(0)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    device.register(int(array.ctypes.data), array.nbytes).close()
    one.close()
    device.close()


def gpu_memory() -> None:
    """There is none here, and both ways say why."""
    device = open_device(DEVICE)
    ok, why = probe_gpu_memory(device)
    print(why)
    assert not ok and "dma-buf: " in why and "peermem: the kernel module" in why
    device.close()


def no_such_device() -> None:
    """Also for the library, where sysfs was not asked."""
    try:
        open_device("mlx5_0")
    except UnavailableError as error:
        assert "mlx5_0 cannot be opened" in str(error)
    else:
        raise AssertionError("opened")


if __name__ == "__main__":
    sys.exit(
        main(
            what_sysfs_tells,
            memory,
            over_the_limit,
            leaving_without_a_word,
            a_forked_child,
            gpu_memory,
            no_such_device,
        )
    )
