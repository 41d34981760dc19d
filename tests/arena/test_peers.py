"""Owns the tests of ranks that map each other's arenas, in processes of their own: proof, leaks, deaths, refusals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from arena_ranks import Rank, memfd_maps, open_descriptors, run

from gfkernels.errors import ConnectError, UsageError
from gfkernels.transport import arena_peers, fdpass
from gfkernels.transport.arena import Arena
from gfkernels.transport.arena_peers import PeerArenas

SECRET = b"shared by the ranks of one job"


def int64s(address: int, count: int) -> np.ndarray[Any, Any]:
    return np.asarray(memoryview((ctypes.c_int64 * count).from_address(address)), np.int64)


def meet(rank: Rank, secret: bytes = SECRET, timeout_s: float = 10.0) -> tuple[Arena, PeerArenas]:
    arena = Arena(64 << 20, n_local=rank.size)
    peers = PeerArenas(arena, rank.exchange, secret=secret, index=rank.index, size=rank.size, timeout_s=timeout_s)
    return arena, peers


def everybody_writes_to_everybody(rank: Rank) -> dict[str, Any]:
    descriptors, maps = open_descriptors(), memfd_maps()
    arena, peers = meet(rank)
    opened, mapped = open_descriptors() - descriptors, memfd_maps() - maps
    used = arena.used_nbytes
    x = arena.empty(rank.size * 1000, "int64")
    x[...] = -1
    offsets = rank.exchange(arena.offset_of(x.ctypes.data))
    for peer in range(rank.size):
        start = peers.resolve(peer, offsets[peer] + rank.index * 8000, 8000)
        int64s(start, 1000)[...] = 100 * rank.index + peer
    rank.exchange(None)
    expected = np.repeat(100 * np.arange(rank.size) + rank.index, 1000)
    correct = bool(np.array_equal(x, expected))
    rank.exchange(None)
    peers.close()
    peers.close()
    del x
    arena.close()
    return {
        "correct": correct,
        "opened": len(opened),
        "mapped": mapped,
        "used": used,
        "left": sorted(open_descriptors() - descriptors),
        "maps left": memfd_maps() - maps,
    }


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_see_all_memory_and_nothing_leaks(size: int) -> None:
    for result in run(everybody_writes_to_everybody, size):
        assert result == {
            "correct": True,
            "opened": 1,  # the rank's own memfd
            "mapped": size,
            "used": 0,
            "left": [],
            "maps left": 0,
        }


def die_after_mapping(rank: Rank) -> Any:
    arena, peers = meet(rank)
    x = arena.empty(1000, "int64")
    x[...] = 7 + rank.index
    offsets = rank.exchange(arena.offset_of(x.ctypes.data))
    pids = rank.exchange(os.getpid())
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while Path(f"/proc/{pids[1]}/stat").exists() and " Z " not in Path(f"/proc/{pids[1]}/stat").read_text():
        time.sleep(0.01)
    theirs = int64s(peers.resolve(1, offsets[1], 8000), 1000)
    seen = int(theirs[999])
    theirs[rank.index] = 1
    peers.close()
    return seen, len(os.listdir("/dev/shm"))


def test_memory_outlives_a_killed_owner_while_it_is_mapped_and_leaves_no_file() -> None:
    files = len(os.listdir("/dev/shm"))
    first, killed, third = run(die_after_mapping, 3)
    assert killed is None
    assert first[0] == third[0] == 8
    assert len(os.listdir("/dev/shm")) <= max(files, first[1])
    assert not [name for name in os.listdir("/dev/shm") if "gfkernels" in name]


def fail_to_meet(rank: Rank, secret: bytes, die: bool = False) -> Any:
    descriptors, maps = open_descriptors(), memfd_maps()
    arena = Arena(1 << 20)
    if die:
        fdpass._follow = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(ConnectError) as caught:
        PeerArenas(arena, rank.exchange, secret=secret, index=rank.index, size=rank.size, timeout_s=2.0)
    arena.close()
    clean = arena.closed and open_descriptors() == descriptors and memfd_maps() == maps
    return str(caught.value), time.monotonic() - start, clean


@pytest.mark.slow
def test_a_rank_with_another_secret_fails_all_ranks() -> None:
    for text, elapsed, clean in run(fail_to_meet, 3, [(SECRET,), (SECRET,), (b"another",)]):
        assert "local ranks [2] did not hand in" in text
        assert "local rank 2: local rank 0 does not know the job's secret" in text and "GFKERNELS_SECRET" in text
        assert elapsed < 8 and clean


@pytest.mark.slow
def test_a_rank_that_dies_meanwhile_fails_the_others_in_time() -> None:
    first, second, killed = run(fail_to_meet, 3, [(SECRET, False), (SECRET, False), (SECRET, True)])
    assert killed is None
    for text, elapsed, clean in (first, second):
        assert "local ranks [2] did not hand in their shared memory in time" in text
        assert elapsed < 8 and clean


def other_memory(rank: Rank) -> str:
    if rank.index == 1:
        # What a rank of another host would see: right size, right secret, other bytes.
        setattr(arena_peers._Token, "__init__", _wrong_token)  # noqa: B010
    with pytest.raises(ConnectError) as caught:
        meet(rank)
    return str(caught.value)


def _wrong_token(token: Any, arena: Arena) -> None:
    token._block = arena.allocate(16)
    token.facts = {"offset": token._block.offset, "token": "00" * 15 + "01"}


def test_memory_without_the_owners_token_is_not_the_same_host() -> None:
    for text in run(other_memory, 3):
        assert "local rank 1's memory does not hold what it wrote there: it is not on this host" in text


def short_of_memory(rank: Rank) -> str:
    arena = Arena(1 << 20)
    if rank.index == 1:

        def refuse(*_: Any) -> Any:
            raise UsageError("16 bytes of shared memory asked for, 0 available")

        setattr(arena, "allocate", refuse)  # noqa: B010
    with pytest.raises(ConnectError) as caught:
        PeerArenas(arena, rank.exchange, secret=SECRET, index=rank.index, size=rank.size)
    return str(caught.value)


def test_a_rank_without_memory_fails_all_ranks() -> None:
    assert all("local rank 1: 16 bytes of shared memory asked for" in text for text in run(short_of_memory, 2))


def unsealed(rank: Rank) -> str:
    arena = Arena(1 << 20)
    if rank.index == 0:
        own = arena.fd
        arena.fd = os.memfd_create("unsealed", os.MFD_CLOEXEC)
        os.ftruncate(arena.fd, arena.size)
        os.close(own)
    with pytest.raises(ConnectError) as caught:
        PeerArenas(arena, rank.exchange, secret=SECRET, index=rank.index, size=rank.size)
    return str(caught.value)


def test_memory_that_its_owner_could_shrink_is_refused() -> None:
    # A shorter file would kill whoever touches its end with SIGBUS.
    assert all("local rank 0 handed over 0 bytes that cannot shrink" in text for text in run(unsealed, 2))


def meet_among_strangers(rank: Rank) -> bool:
    if rank.index == 0:
        listen = fdpass._listen

        def with_strangers(end: socket.socket, size: int) -> str:
            name = listen(end, size)
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, fdpass._HELLO.pack(b"gfk-fd01", 1, b"n" * 32)):
                threading.Thread(target=_intrude, args=(name, data), daemon=True).start()
            time.sleep(0.2)
            return name

        fdpass._listen = with_strangers
    _, peers = meet(rank)
    return all(peers.addresses)


def _intrude(name: str, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(b"\0" + name.encode())
        end.sendall(data)
        if data.startswith(b"gfk"):
            end.recv(64)
            end.sendall(b"w" * 32)


def test_strangers_are_turned_away_and_the_ranks_still_meet() -> None:
    assert run(meet_among_strangers, 3) == [True] * 3


def elsewhere(rank: Rank) -> str:
    if rank.index == 1:
        # In another network namespace the leader's abstract name does not exist.
        connect = fdpass._connect
        fdpass._connect = lambda end, name, deadline: connect(end, name + "-elsewhere", deadline)
    start = time.monotonic()
    with pytest.raises(ConnectError) as caught:
        meet(rank)
    assert time.monotonic() - start < 5, "nobody may wait for a rank that cannot come"
    return str(caught.value)


def test_ranks_in_several_network_namespaces_are_told_at_once() -> None:
    for text in run(elsewhere, 3):
        assert "local rank 1: [Errno 111] Connection refused" in text and "one network namespace" in text


def few_descriptors(rank: Rank, left: int) -> str:
    arena = Arena(1 << 20)
    if rank.index == 3:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(arena.fd))
        for descriptor in taken[len(taken) - left :]:
            os.close(descriptor)
    with pytest.raises(ConnectError) as caught:
        PeerArenas(arena, rank.exchange, secret=SECRET, index=rank.index, size=rank.size)
    return str(caught.value)


@pytest.mark.parametrize(("left", "pattern"), [(0, r"local rank 3: no Unix socket: .*Too many"), (3, r"ulimit -n")])
def test_too_few_descriptors_are_named(left: int, pattern: str) -> None:
    for text in run(few_descriptors, 5, [(left,)] * 5):
        assert re.search(pattern, text)


def test_ranges_outside_a_peers_arena_are_refused() -> None:
    arena = Arena(1 << 20)
    peers = PeerArenas(arena, lambda value: [value], secret=SECRET, index=0, size=1)
    assert peers.resolve(0, 8, 8) == arena.address + 8
    for offset, nbytes in ((-1, 4), (arena.size, 1), (0, arena.size + 1), (4, -8)):
        with pytest.raises(ValueError, match="are not in local rank 0"):
            peers.resolve(0, offset, nbytes)
    peers.close()
    arena.close()
    assert arena.closed


def test_a_full_dev_shm_does_not_matter() -> None:
    """In a mount namespace of its own, whose /dev/shm has 64 KiB, all of them taken."""
    unshare = shutil.which("unshare")
    script = f"""
mount -t tmpfs -o size=64k tmpfs /dev/shm || exit 77
head -c 65536 /dev/zero > /dev/shm/full
exec {sys.executable} -c 'from gfkernels.transport.arena import Arena
x = Arena().empty(30_000_000)
x[...] = 1
print(int(x.sum()))'
"""
    if unshare is None:
        pytest.skip("unshare is not installed: a full /dev/shm is not tested")
    done = subprocess.run([unshare, "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    if done.returncode == 77 or "Operation not permitted" in done.stderr:
        pytest.skip(f"no mount namespace here ({done.stderr.strip()}): a full /dev/shm is not tested")
    assert done.stdout.strip() == "30000000", done.stderr
