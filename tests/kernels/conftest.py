"""Owns what the kernel tests share: their helper modules can be imported."""

from __future__ import annotations

import sys
from pathlib import Path

# pytest's importlib mode puts no test folder on the path.
for folder in (Path(__file__).parent, Path(__file__).parent.parent):
    sys.path.insert(0, str(folder))
