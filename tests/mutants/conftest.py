"""Owns how the tests of mutants find their helpers."""

from __future__ import annotations

import sys
from pathlib import Path

for _folder in ("mutants", "rows", "engine"):
    sys.path.insert(0, str(Path(__file__).parent.parent / _folder))
