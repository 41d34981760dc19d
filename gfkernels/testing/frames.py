"""Owns the frames on the pipes between a test and its ranks: eight bytes of length, then the data."""

from __future__ import annotations

import os
from typing import Final

LENGTH_NBYTES: Final = 8


def send(descriptor: int, data: bytes) -> None:
    """Writes one frame, waiting for room."""
    view = memoryview(len(data).to_bytes(LENGTH_NBYTES, "little") + data)
    while view:
        view = view[os.write(descriptor, view) :]


def take(received: bytearray) -> bytes | None:
    """Removes the first frame from what was received; None while it is not complete."""
    if len(received) < LENGTH_NBYTES:
        return None
    end = LENGTH_NBYTES + int.from_bytes(received[:LENGTH_NBYTES], "little")
    if len(received) < end:
        return None
    frame = bytes(received[LENGTH_NBYTES:end])
    del received[:end]
    return frame
