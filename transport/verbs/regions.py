"""Owns the table of a device's registered memory, in which compiled code looks up the keys of an address."""

from __future__ import annotations

import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from gfkernels.errors import UnavailableError
from gfkernels.native.libc import publish

MAX_REGIONS: Final = 1024
_WORDS: Final = 4  # start, end, lkey, rkey


class Regions:
    """Rows (start, end, lkey, rkey) by address, changed by one thread while compiled code of others reads them.

    Reading takes no lock: a row is complete before the count includes it, and a row that is taken out becomes empty
    (no span lies in it) before its memory loses its keys. Empty rows are used again.
    """

    def __init__(self) -> None:
        self._words: npt.NDArray[np.int64] = np.zeros(1 + _WORDS * MAX_REGIONS, np.int64)
        self._lock = threading.RLock()  # the garbage collector may take a row out while this thread adds one
        self._free: list[int] = []

    @property
    def address(self) -> int:
        """Of the count, which the rows follow."""
        return int(self._words.ctypes.data)

    def add(self, start: int, nbytes: int, lkey: int, rkey: int) -> int:
        """Adds registered memory; the row's number, for `remove`.

        Raises:
            UnavailableError: MAX_REGIONS pieces of memory are registered.
        """
        with self._lock:
            count = int(self._words[0])
            if not self._free and count == MAX_REGIONS:
                raise UnavailableError(
                    f"{MAX_REGIONS} pieces of memory are registered with the card, which is all that there is room for",
                    "Put arrays that travel into fewer, larger gfkernels.empty allocations, and use views of them",
                )
            number = self._free.pop() if self._free else count
            at = self.address + 8 * (1 + _WORDS * number)
            # The end goes last: before, the row holds no byte.
            publish(at + 8, 0)
            for word, value in ((0, start), (2, lkey), (3, rkey), (1, start + nbytes)):
                publish(at + 8 * word, value)
            if number == count:
                publish(self.address, count + 1)
            return number

    def remove(self, number: int) -> None:
        """Takes a row out; to be called before its memory is deregistered."""
        with self._lock:
            publish(self.address + 8 * (1 + _WORDS * number) + 8, 0)
            self._free.append(number)
