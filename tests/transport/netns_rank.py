"""One rank of a ring over TCP, started by tests inside a network namespace: sends `turns` blocks right, checks left's.

Usage: netns_rank.py RANK SIZE FOLDER NBYTES TURNS ADDRESS; prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from gfkernels.transport.conformance_rig import Endpoint, compiled, noise
from gfkernels.transport.table import OK
from gfkernels.transport.tcp_connect import connect


class FileExchange:
    """An allgather through files: namespaces share the file system."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self._rank, self._size, self._folder = rank, size, folder
        self._turn = 0

    def __call__(self, value: object) -> list[object]:
        self._turn += 1
        paths = [self._folder / f"{self._turn}.{rank}" for rank in range(self._size)]
        temporary = self._folder / f"{self._turn}.{self._rank}.new"
        temporary.write_text(json.dumps(value))
        temporary.rename(paths[self._rank])
        deadline = time.monotonic() + 30
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                raise TimeoutError("the other ranks did not come")
            time.sleep(0.005)
        return [json.loads(path.read_text()) for path in paths]


def main(rank: int, size: int, folder: str, nbytes: int, turns: int, address: str) -> None:
    exchange = FileExchange(rank, size, Path(folder))
    channels = connect(rank, size, exchange=exchange, secret=b"netns test secret", addresses=[address], timeout_s=20)
    me = Endpoint(rank, channels, compiled)
    target = me.own(0, nbytes)
    right, left = ((rank + step) % size for step in (1, -1))
    ends = {q: Endpoint(q, channels, compiled) for q in (right, left)}
    me.begin(1)
    started = time.monotonic()
    wrong = 0
    for turn in range(1, turns + 1):
        data = noise(nbytes, seed=100 * turn + rank)
        while (code := me.put(ends[right], 0, data)) != OK:
            _check(code)
            _check(me.progress())
        while (arrived := me.poll(ends[left], 0)) < turn:
            _check(arrived)
            _check(me.progress())
        wrong += int((target != noise(nbytes, seed=100 * turn + left)).sum())
        # The block may be overwritten only now.
        me.put(ends[left], 1, None)
        while me.poll(ends[right], 1) < turn:
            _check(me.progress())
    while me.flush() != OK:
        _check(me.progress())
    seconds = time.monotonic() - started
    peer = channels.sockets[right].getpeername()[0]
    channels.close()
    print(json.dumps({"rank": rank, "wrong": wrong, "seconds": seconds, "peer": peer}))


def _check(code: int) -> None:
    if code < 0:
        raise SystemExit(f"fault {code}")


if __name__ == "__main__":
    r, n, where, block, count, own = sys.argv[1:]
    main(int(r), int(n), where, int(block), int(count), own)
