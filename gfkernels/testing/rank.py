"""Owns the inside of a rank that a test started: takes functions from its parent's pipe and answers how they ended.

Started by `pool` as `python -m gfkernels.testing.rank COMMANDS RESULTS`, two descriptors of pipes. Pickle is for the
parent that started this process, and nobody else can reach these pipes.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import gfkernels as gf
from gfkernels.testing.frames import LENGTH_NBYTES, send

_GRACE_S: Final = 5.0
"""From the end of the commands to the end of this process, whatever it is doing."""


def main(commands: int, results: int) -> None:
    """Runs commands in turn until the parent closes the pipe or dies."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for descriptor in (commands, results):
        os.set_inheritable(descriptor, False)
    waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(commands, waiting), name="commands", daemon=True).start()
    while (command := waiting.get()) is not None:
        answer = _execute(command)
        # Whatever the function printed is in its file before the parent looks.
        sys.stdout.flush()
        sys.stderr.flush()
        send(results, answer)
    gf.shutdown()


def _read_commands(descriptor: int, waiting: queue.SimpleQueue[bytes | None]) -> None:
    with os.fdopen(descriptor, "rb") as stream:
        while len(head := stream.read(LENGTH_NBYTES)) == LENGTH_NBYTES:
            waiting.put(stream.read(int.from_bytes(head, "little")))
    waiting.put(None)
    threading.Event().wait(_GRACE_S)
    # Still here: stuck in a call, or the parent died while one was running.
    print(f"gfkernels.testing: rank {os.environ.get('RANK')} did not end in {_GRACE_S:g} s", file=sys.stderr)
    faulthandler.dump_traceback(all_threads=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _execute(command: bytes) -> bytes:
    try:
        path, name, file, qualname, packed = pickle.loads(command)
        sys.path[:] = path
        target = _find(name, file, qualname)
        value = target(*pickle.loads(packed))
        return pickle.dumps(("value", pickle.dumps(value), ""))
    except BaseException as error:
        text = traceback.format_exc()
        # Peers that wait for this rank shall hear of it now, not at their deadline.
        if gf.is_initialized():
            gf.default_communicator().crash(error)
        return pickle.dumps(("error", _packed_error(error), text))


def _find(name: str, file: str, qualname: str) -> Callable[..., Any]:
    found: Any = _module(name, file)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{qualname} of {file} is no function")
    return found  # type: ignore[no-any-return]


def _module(name: str, file: str) -> ModuleType:
    """The module of a function: by its name where that leads to the same file, else from the file."""
    if name == "__main__":
        name = "__gfkernels_main__"  # so that its `if __name__ == "__main__"` stays out
    known = sys.modules.get(name)
    if known is not None:
        return known
    if _leads_to(name, file):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported", name=name, path=file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _leads_to(name: str, file: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)


def _packed_error(error: BaseException) -> bytes:
    """The error as bytes that can be read again, empty where that is not possible."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:
        return b""
    return packed


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
