"""Owns the ways that bytes can take between ranks of one host, as settings, and which of them the quick tests use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

# Small pieces: a few thousand elements fill every slot of every pipeline several times over.
_SMALL: dict[str, Any] = {"segment_bytes": 1024, "staging_bytes": 65536, "inline_bytes": 256}

SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "small": _SMALL,
    "shm": {"transport": "shm"},
    "cma": {"transport": "cma", **_SMALL},
    "tcp": {"transport": "tcp"},
    "ring": {"transport": "shm", "plan": "ring", "segment_bytes": 1024, "lanes": 2},
    "doubling": {"transport": "shm", "plan": "recursive_doubling"},
    "tcp-ring": {"transport": "tcp", "plan": "ring", "segment_bytes": 2048},
    "tcp-doubling": {"transport": "tcp", "plan": "recursive_doubling"},
}


@dataclass(frozen=True)
class Way:
    """So many ranks with such settings."""

    name: str
    size: int

    @property
    def options(self) -> dict[str, Any]:
        """For `gfkernels.init`."""
        return SETTINGS[self.name]

    @property
    def is_direct(self) -> bool:
        """Whether calls follow `direct` plans."""
        return self.name in ("auto", "small", "shm", "cma") and self.size > 1

    def __str__(self) -> str:
        return f"{self.name}-{self.size}"


def ways(*slow: str, quick: tuple[str, ...] = ()) -> list[Any]:
    """Parameters from texts such as "tcp-ring-3"."""
    found = [(text, False) for text in quick] + [(text, True) for text in slow]
    return [
        pytest.param(
            Way(*_split(text)),
            id=text,
            marks=[pytest.mark.xdist_group(f"collectives-{text}"), *([pytest.mark.slow] if is_slow else [])],
        )
        for text, is_slow in found
    ]


def _split(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("-")
    return name, int(size)
