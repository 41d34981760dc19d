"""Owns how the tests of the engine find their helpers, and those of the plans."""

from __future__ import annotations

import sys
from pathlib import Path

# With --import-mode=importlib a test's folder is not on the path, and two helper modules may bear the same name.
for folder in (Path(__file__).parent, Path(__file__).parent.parent / "plan", Path(__file__).parent.parent):
    sys.path.insert(0, str(folder))
