"""Owns the `gfkernels` logger: its level from `GFKERNELS_LOG`, and the rank in front of every message."""

from __future__ import annotations

import logging
import sys
from typing import Final

LEVELS: Final = ("debug", "info", "warning", "error", "off")

log: Final = logging.getLogger("gfkernels")


class _RankPrefix(logging.Filter):
    """Puts `[rank r]` into the message itself, so that it is there whoever handles the record."""

    def __init__(self) -> None:
        super().__init__()
        self.rank: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if self.rank is not None and not getattr(record, "gfkernels_prefixed", False):
            record.msg = f"[rank {self.rank}] {record.msg}"
            record.gfkernels_prefixed = True
        return True


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current `sys.stderr`, but only where the application has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            # Not setStream, which flushes the old one: that may be closed by now.
            self.stream = sys.stderr
            super().emit(record)


_prefix: Final = _RankPrefix()
log.addFilter(_prefix)


def configure(level: str, rank: int | None = None) -> None:
    """Sets the logger's level (one of `LEVELS`) and the rank it prints.

    Args:
        level: messages below it are dropped; "off" drops all.
        rank: this process's rank, or None before it is known.
    """
    _prefix.rank = rank
    log.setLevel(logging.CRITICAL + 1 if level == "off" else level.upper())
    if not any(isinstance(handler, _Handler) for handler in log.handlers):
        handler = _Handler()
        handler.setFormatter(logging.Formatter("gfkernels %(levelname)s: %(message)s"))
        log.addHandler(handler)
