"""Owns the tests of one process's arena: arrays and their lifetime, shortage of memory, forks, threads, closing."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arena_ranks import memfd_maps, open_descriptors

from gfkernels.errors import UnavailableError, UsageError
from gfkernels.transport import arena_map, arena_memory
from gfkernels.transport.arena import Arena
from gfkernels.types import DTYPES

MakeArena = Callable[..., Arena]
PAGE = arena_map.PAGE


def file_nbytes(arena: Arena) -> int:
    """Memory that the arena really takes."""
    return os.fstat(arena.fd).st_blocks * 512


@pytest.mark.parametrize("name", DTYPES)
def test_empty_gives_ordinary_arrays_of_every_dtype(make_arena: MakeArena, name: str) -> None:
    arena = make_arena()
    for dtype in (name, DTYPES[name], DTYPES[name].numpy):
        x = arena.empty((3, 5), dtype)
        assert type(x) is np.ndarray and x.shape == (3, 5) and x.dtype == DTYPES[name].numpy
        assert x.flags.c_contiguous and x.flags.writeable and x.flags.aligned
        assert x.ctypes.data % PAGE == 0 and arena.contains(x.ctypes.data, x.nbytes)
        x[...] = 1
        assert x.astype(np.float64).sum() == 15
    assert arena.empty(7).dtype == np.float32
    assert arena.empty((), "int64").shape == ()


def test_views_keep_the_block_and_the_last_one_gives_it_back(make_arena: MakeArena) -> None:
    arena = make_arena()
    x = arena.empty((1000, 1000), "float32")
    x[...] = 3
    assert file_nbytes(arena) >= x.nbytes
    views: list[Any] = [x[5], x.reshape(-1)[::7], x.T, x.view(np.int32), np.asarray(x)[2:], memoryview(x.data)]
    del x
    while views:
        assert arena.used_nbytes >= 4_000_000
        views.pop()
    assert arena.used_nbytes == 0
    assert file_nbytes(arena) == 0


def test_offsets_and_ranges(make_arena: MakeArena) -> None:
    arena = make_arena()
    x = arena.empty(PAGE, "uint8")
    y = arena.empty(PAGE, "uint8")
    assert arena.offset_of(y[10:].ctypes.data) == arena.offset_of(x.ctypes.data) + PAGE + 10
    assert not arena.contains(arena.address - 1, 4)
    assert not arena.contains(arena.address + arena.size - 4, 8)
    private = np.zeros(3)
    with pytest.raises(UsageError, match=r"not in this process's shared memory.*gfkernels\.empty"):
        arena.offset_of(private.ctypes.data)
    assert not arena.contains(arena.empty((0, 4)).ctypes.data, 1)


def test_blocks_do_not_overlap_and_are_aligned(make_arena: MakeArena) -> None:
    arena = make_arena()
    blocks = [arena.allocate(n, alignment) for n, alignment in ((1, 1), (5000, 64), (1, 1 << 20), (0, 1), (9000, 1))]
    assert blocks[2].offset % (1 << 20) == 0
    ranges = sorted((block.offset, block.offset + max(1, block.nbytes)) for block in blocks)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    for block in blocks:
        block.release()
        block.release()
    assert arena.used_nbytes == 0


def test_bad_shapes_and_dtypes_are_refused(make_arena: MakeArena) -> None:
    arena = make_arena()
    for shape, dtype, pattern in (
        ((2, -1), "float32", "negative"),
        ("ab", "float32", "not an integer"),
        (2.5, "float32", "not an integer"),
        (3, "complex64", "complex64 is not supported"),
        (3, "nonsense", "not known"),
        (3, object, "object is not supported"),
    ):
        bad: Any = shape
        with pytest.raises(UsageError, match=pattern):
            arena.empty(bad, dtype)
    with pytest.raises(UsageError, match="negative"):
        arena.allocate(-1)


def test_a_full_arena_is_a_usage_error_and_usable_afterwards(make_arena: MakeArena) -> None:
    arena = make_arena(1 << 20)
    x = arena.empty(700_000, "uint8")
    with pytest.raises(UsageError, match=r"500000 bytes.*asked for, \d+ available"):
        arena.empty(500_000, "uint8")
    del x
    assert arena.empty(1_000_000, "uint8").size == 1_000_000


def test_memory_of_the_host_short(make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make_arena()
    monkeypatch.setattr(arena_memory, "available_nbytes", lambda: (20 << 20, "MemAvailable"))
    with pytest.raises(UsageError, match=rf"{8 << 20} bytes of shared memory asked for, {4 << 20} available: MemAvail"):
        arena.empty(8 << 20, "uint8")
    assert arena.used_nbytes == 0
    assert arena.empty(1 << 20, "uint8").size == 1 << 20


def test_arrays_in_reference_cycles_are_found_when_memory_is_short(
    make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = make_arena()
    monkeypatch.setattr(arena_memory, "available_nbytes", lambda: ((60 << 20) - file_nbytes(arena), "MemAvailable"))
    gc.disable()
    try:
        cycle: list[Any] = [arena.empty(30 << 20, "uint8")]
        cycle.append(cycle)
        del cycle
        assert arena.empty(30 << 20, "uint8").size == 30 << 20
    finally:
        gc.enable()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
def test_the_kernel_refuses_halfway(make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    arena = make_arena()
    calls = []

    def refuse(fd: int, offset: int, nbytes: int) -> None:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(code, os.strerror(code))
        real(fd, offset, nbytes)

    real = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr("gfkernels.transport.arena._STEP", 1 << 20)
    with pytest.raises(UsageError, match=rf"{3 << 20} bytes.*asked for, \d+ available: {os.strerror(code)}"):
        arena.empty(3 << 20, "uint8")
    assert arena.used_nbytes == 0 and file_nbytes(arena) == 0


def test_other_errors_and_interrupts_leave_nothing_taken(
    make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = make_arena()
    for error in (KeyboardInterrupt(), OSError(errno.EIO, "io")):

        def fail(*_: int, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(type(error)):
            arena.empty(100)
        assert arena.used_nbytes == 0


def test_cgroup_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    monkeypatch.setattr(arena_memory, "PROC", str(tmp_path / "proc"))
    monkeypatch.setattr(arena_memory, "CGROUPS", str(tmp_path / "cgroup"))
    assert arena_memory.available_nbytes() == (3_072_000, "memory available on this host (MemAvailable)")
    assert arena_memory.total_nbytes() == 4_096_000

    # Version 2: the parent's limit counts as well, and page cache can be dropped.
    (tmp_path / "proc/self/cgroup").write_text("0::/job/rank\n")
    for name, limit, used, cache in (("job", "1000000", "900000", 200_000), ("job/rank", "max", "100", 0)):
        folder = tmp_path / "cgroup" / name
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache // 2}\nactive_file {cache // 2}\n")
    nbytes, source = arena_memory.available_nbytes()
    assert nbytes == 300_000 and source.endswith("job/memory.max = 1000000")

    # Version 1, in a container that shows only its own group.
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,memory:/docker/abc\n1:name=systemd:/\n")
    folder = tmp_path / "cgroup/memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("500000\n")
    (folder / "memory.usage_in_bytes").write_text("499000\n")
    nbytes, source = arena_memory.available_nbytes()
    assert nbytes == 1000 and "memory.limit_in_bytes = 500000" in source
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert arena_memory.available_nbytes()[0] == 3_072_000


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_address_space_and_file_size_limits_make_a_smaller_arena() -> None:
    code = """
import resource
from gfkernels.transport.arena import Arena
resource.setrlimit(resource.RLIMIT_{limit}, ({soft}, resource.RLIM_INFINITY))
arena = Arena(n_local=2)
x = arena.empty(1000)
print(arena.size)
"""
    assert 0 < int(run_python(code.format(limit="AS", soft=8 << 30))) <= 1 << 30
    assert 0 < int(run_python(code.format(limit="FSIZE", soft=100 << 20))) <= 100 << 20


def test_no_address_space_at_all_is_an_unavailable_error() -> None:
    before = open_descriptors()
    with pytest.raises(UnavailableError, match=r"cannot map \d+ bytes.*ulimit -v"):
        Arena(1 << 50)
    assert open_descriptors() == before


def test_default_size_leaves_room_for_every_rank_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_memory, "total_nbytes", lambda: 4 << 40)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert arena_map.default_size(1) == 4 << 40
    assert arena_map.default_size(64) * 64 <= 1 << 46


def test_an_old_kernel_without_populate_is_touched_page_by_page(
    make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_map, "populate", lambda *_: False)
    assert make_arena().empty(100_000).size == 100_000


def test_huge_pages_on_request(make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(arena_map, "huge_pages_on_request", lambda: True)
    monkeypatch.setattr(arena_map, "ask_for_huge_pages", lambda *range_: asked.append(range_))
    arena = make_arena()
    small, big = arena.empty(1000), arena.empty(3 << 20, "uint8")
    assert [address for address, _ in asked] == [big.ctypes.data] and big.ctypes.data % arena_map.HUGE == 0
    assert small.size == 1000


def test_a_forked_child_leaves_the_memory_alone(make_arena: MakeArena) -> None:
    arena = make_arena()
    x = arena.empty(100_000)
    x[...] = 5
    used = file_nbytes(arena)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            arena.empty(10)
        except UsageError as error:
            status = 0 if "was forked from rank process" in str(error) and x[7] == 5 else 2
        del x
        gc.collect()
        arena.close()
        os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert np.all(x == 5) and file_nbytes(arena) == used


def test_closing_waits_for_the_last_array() -> None:
    descriptors, maps = open_descriptors(), memfd_maps()
    arena = Arena(1 << 20)
    x = arena.empty(100)
    arena.close()
    with pytest.raises(UsageError, match="closed"):
        arena.empty(10)
    x[...] = 1
    assert not arena.closed and memfd_maps() == maps + 1
    del x
    assert arena.closed and not arena.contains(arena.address, 1)
    assert memfd_maps() == maps and open_descriptors() == descriptors
    arena.close()


def test_arrays_at_interpreter_exit_do_no_harm() -> None:
    code = "import sys; from gfkernels.transport.arena import Arena; a = Arena(1 << 20); sys.x = a.empty(9)"
    assert run_python(code) == ""


def test_threads_and_the_garbage_collector(make_arena: MakeArena) -> None:
    arena = make_arena()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(40):
                x = arena.empty(1 + (seed * 37 + i * 101) % 9000, "int32")
                x[...] = seed
                cycle: list[Any] = [x]
                cycle.append(cycle)
                gc.collect(0)
                assert np.all(x == seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not errors and arena.used_nbytes == 0 and file_nbytes(arena) == 0


def test_a_finalizer_that_runs_while_the_lock_is_held_does_not_wait(make_arena: MakeArena) -> None:
    arena = make_arena()
    x = arena.empty(100)
    with arena._lock:
        del x
    assert arena.used_nbytes == 0
