"""Owns spawned ranks for the arena's tests: they run a function of a test module and gather through this process."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

# Ranks share nothing with this process, as if spawned, yet import nothing anew: that is most of a spawned rank's time.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "gfkernels.transport.arena_peers"])


class Rank:
    """What a function run by `run` gets: its place, and the all-gather that a bootstrap would give it."""

    def __init__(self, index: int, size: int, pipe: Any) -> None:
        self.index, self.size, self._pipe = index, size, pipe

    def exchange(self, value: Any) -> list[Any]:
        """All-gather; fails when another rank is gone."""
        self._pipe.send(("gather", value))
        if not self._pipe.poll(20):
            raise TimeoutError("no gather within 20 s")
        return list(self._pipe.recv())


def _child(file: str, name: str, index: int, size: int, pipe: Any, arguments: tuple[Any, ...]) -> None:
    spec = importlib.util.spec_from_file_location("arena_test_child", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        pipe.send(("result", getattr(module, name)(Rank(index, size, pipe), *arguments)))
    except Exception as error:
        pipe.send(("error", error))
    except BaseException as error:  # pytest's own outcomes
        pipe.send(("error", AssertionError(str(error))))


def run(function: Callable[..., Any], size: int, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
    """What `function(rank, *arguments[rank])` returned on each rank; an exception it raised; None where it died."""
    pipes = [_context.Pipe() for _ in range(size)]
    processes = []
    for index, (_, end) in enumerate(pipes):
        given = () if arguments is None else arguments[index]
        call = (function.__code__.co_filename, function.__name__, index, size, end, given)
        processes.append(_context.Process(target=_child, args=call, daemon=True))
    for process, (_, end) in zip(processes, pipes, strict=True):
        process.start()
        end.close()
    try:
        return _serve([pipe for pipe, _ in pipes])
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        for pipe, _ in pipes:
            pipe.close()


def _serve(pipes: list[Any]) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    finished: set[int] = set()
    waiting: dict[int, Any] = {}
    deadline = time.monotonic() + 30
    while len(finished) < len(pipes):
        if time.monotonic() > deadline:
            raise AssertionError(f"ranks {sorted(set(range(len(pipes))) - finished)} did not finish")
        for index, pipe in enumerate(pipes):
            if index in finished or not pipe.poll(0.005):
                continue
            try:
                kind, value = pipe.recv()
            except EOFError:
                finished.add(index)
                continue
            if kind == "gather":
                waiting[index] = value
            elif isinstance(value, AssertionError):
                raise value
            else:
                results[index] = value
                finished.add(index)
        if waiting and len(waiting) + len(finished) == len(pipes):
            row = [waiting.get(index) for index in range(len(pipes))]
            for index in waiting:
                pipes[index].send(row)
            waiting = {}
    return results


def open_descriptors() -> set[str]:
    """What this process has open, without the pipes that come and go."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            continue
    return {entry for entry in found if "/proc/" not in entry}


def memfd_maps() -> int:
    """How many mappings of arenas this process has."""
    with open("/proc/self/maps") as file:
        return sum("memfd:gfkernels" in line for line in file)
