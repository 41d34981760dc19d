"""Owns how the tests of mutants find their helpers."""

from __future__ import annotations

import sys
from pathlib import Path

for _folder in (Path(__file__).parent, Path(__file__).parent.parent / "rows"):
    sys.path.insert(0, str(_folder))
