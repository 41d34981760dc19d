"""Cross-memory attach between real processes: both directions, partial transfers, and every way to be refused."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gfkernels.transport import cma
from gfkernels.transport.table import OK, Fault

_ROOT = str(Path(__file__).parents[2])

# A child that owns a token and an array of known content, prints their addresses, and shows on request what it holds.
_OWNER = """
import json, sys
import numpy as np
from gfkernels.transport import cma
cma.allow_ptrace("any")
token = cma.make_token()
data = np.arange(3 << 20, dtype=np.uint32).view(np.uint8)
print(json.dumps([token.ctypes.data, token[:32].tobytes().hex(), data.ctypes.data, data.nbytes]), flush=True)
for line in sys.stdin:
    print(json.dumps([token[32:].tobytes().hex(), int(data.sum(dtype=np.uint64)), data[1:4].tolist()]), flush=True)
"""


@contextmanager
def _owner() -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([_ROOT, os.environ.get("PYTHONPATH", "")])}
    argv = [sys.executable, "-c", _OWNER]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: subprocess.Popen[str]) -> list[object]:
    assert process.stdout is not None
    result: list[object] = json.loads(process.stdout.readline())
    return result


def _ask(process: subprocess.Popen[str]) -> list[object]:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return _line(process)


@pytest.fixture(scope="module")
def owner() -> Iterator[tuple[subprocess.Popen[str], int, bytes, int, int]]:
    with _owner() as process:
        token, expected, data, nbytes = _line(process)
        yield process, int(str(token)), bytes.fromhex(str(expected)), int(str(data)), int(str(nbytes))


Owner = tuple[subprocess.Popen[str], int, bytes, int, int]


@pytest.mark.slow
def test_probe_reads_and_writes(owner: Owner) -> None:
    process, token, expected, _, _ = owner
    assert cma.probe(process.pid, token, 64, expected) == (True, "")
    assert _ask(process)[0] == expected.hex(), "the token was not written back"


def test_probe_tells_another_process_from_the_peer(owner: Owner) -> None:
    process, token, _, _, _ = owner
    ok, reason = cma.probe(process.pid, token, 64, bytes(32))
    assert not ok
    assert "pid namespace" in reason


def test_probe_of_a_process_that_does_not_exist() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    ok, reason = cma.probe(process.pid, 4096, 64, bytes(32))
    assert not ok
    assert "No such process" in reason


def test_probe_of_an_address_that_is_not_mapped(owner: Owner) -> None:
    ok, reason = cma.probe(owner[0].pid, 8, 64, bytes(32))
    assert not ok
    assert "Bad address" in reason


def test_probe_refuses_a_token_of_the_wrong_size(owner: Owner) -> None:
    with pytest.raises(ValueError, match="32 bytes, not of 31"):
        cma.probe(owner[0].pid, owner[1], 64, bytes(31))


def test_get_and_put(owner: Owner) -> None:
    process, _, _, data, nbytes = owner
    state = cma.state([os.getpid(), process.pid])
    local = np.zeros(nbytes, np.uint8)
    assert cma.get.ctypes(state.address, 1, local.ctypes.data, data, nbytes) == OK
    assert (local == np.arange(3 << 20, dtype=np.uint32).view(np.uint8)).all()
    patch = np.array([250, 251, 252], np.uint8)
    assert cma.put.ctypes(state.address, 1, -1, patch.ctypes.data, data + 1, 0, 1, 3) == OK
    assert _ask(process)[2] == [250, 251, 252]
    assert cma.put.ctypes(state.address, 1, -1, local.ctypes.data, data, 0, 0, nbytes) == OK
    assert _ask(process)[1] == int(local.sum(dtype=np.uint64))
    assert state.fault is None


def test_put_cannot_signal(owner: Owner) -> None:
    state = cma.state([os.getpid(), owner[0].pid])
    assert cma.put.ctypes(state.address, 1, 0, 0, 0, 0, 0, 0) == -Fault.UNSUPPORTED


def test_partly_mapped_memory_is_a_fault_not_a_short_read(owner: Owner) -> None:
    """The kernel moves what is mapped and stops; the loop must come to the error and not go round for ever."""
    process, _, _, _, _ = owner
    state = cma.state([os.getpid(), process.pid])
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    spans = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in maps if " r" in line]
    ends = [end for index, (_, end) in enumerate(spans) if index + 1 < len(spans) and spans[index + 1][0] > end + 65536]
    local = np.zeros(8192, np.uint8)
    assert cma.get.ctypes(state.address, 1, local.ctypes.data, ends[0] - 4096, 8192) == -Fault.SYSTEM
    assert state.fault == (Fault.SYSTEM, 14, 1)
    assert "Bad address" in state.explain()


@pytest.mark.slow
def test_a_peer_that_dies_is_lost() -> None:
    with _owner() as process:
        _, _, data, _ = _line(process)
        state = cma.state([process.pid])
        local = np.zeros(4, np.uint8)
        assert cma.get.ctypes(state.address, 0, local.ctypes.data, int(str(data)), 4) == OK
        process.kill()
        process.wait()
        assert cma.get.ctypes(state.address, 0, local.ctypes.data, int(str(data)), 4) == -Fault.PEER_LOST
        assert "rank 0 is gone" in state.explain()


# Installs a classic BPF filter that answers errno to process_vm_readv (310 on x86-64, 270 on arm64) and writev (+1).
_FILTERED = """
import ctypes, os, platform, struct, sys
pid, address, expected, code, which = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
from gfkernels.transport import cma
number = {"x86_64": 310, "aarch64": 270}[platform.machine()] + (which == "write")
program = b"".join(struct.pack("<HBBI", *row) for row in [
    (0x20, 0, 0, 0),              # load the system call's number
    (0x15, 0, 1, number),         # if it is that one
    (0x06, 0, 0, 0x00050000 | code),  # answer errno
    (0x06, 0, 0, 0x7FFF0000),     # else allow
])
keep = ctypes.create_string_buffer(program)
filter_ = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 4, ctypes.addressof(keep)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, filter_, 0, 0) == 0, os.strerror(ctypes.get_errno())
print(*cma.probe(pid, address, 64, bytes.fromhex(expected)), sep="|")
"""


@pytest.mark.parametrize(
    ("code", "which", "expected"),
    [
        (1, "read", "reading process {pid}: Operation not permitted (errno 1). "),
        (1, "write", "writing to process {pid}: Operation not permitted (errno 1). "),
        (38, "read", "does not offer process_vm_readv"),
    ],
)
@pytest.mark.slow
def test_probe_explains_a_seccomp_filter(owner: Owner, code: int, which: str, expected: str) -> None:
    process, token, secret, _, _ = owner
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([_ROOT, os.environ.get("PYTHONPATH", "")])}
    argv = [sys.executable, "-c", _FILTERED, str(process.pid), str(token), secret.hex(), str(code), which]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    ok, reason = done.stdout.strip().split("|")
    assert ok == "False"
    assert expected.format(pid=process.pid) in reason
    assert "seccomp" in reason


def test_yama_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scope = tmp_path / "ptrace_scope"
    monkeypatch.setattr(cma, "_YAMA", scope)
    assert cma.allow_ptrace("any") == (True, ""), "a kernel without Yama needs nothing"
    scope.write_text("0\n")
    assert cma.allow_ptrace("off") == (True, "")
    scope.write_text("1\n")
    ok, reason = cma.allow_ptrace("off")
    assert not ok
    assert "switched off" in reason
    scope.write_text("2\n")
    ok, reason = cma.allow_ptrace("any")
    assert not ok
    with pytest.raises(ValueError, match="everybody"):
        cma.allow_ptrace("everybody")


def test_yama_asks_for_the_right_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    class Libc:
        def prctl(self, option: int, who: ctypes.c_ulong, *_: int) -> int:
            asked.append((option, who.value))
            return 0

    scope = tmp_path / "ptrace_scope"
    scope.write_text("1\n")
    monkeypatch.setattr(cma, "_YAMA", scope)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc())
    assert cma.allow_ptrace("any") == (True, "")
    assert cma.allow_ptrace("parent") == (True, "")
    assert asked == [(0x59616D61, 2**64 - 1), (0x59616D61, os.getppid())]
