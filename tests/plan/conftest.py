"""Owns how the tests of plans find their helpers."""

from __future__ import annotations

import sys
from pathlib import Path

# With --import-mode=importlib a test's folder is not on the path, and two helper modules may bear the same name.
sys.path.insert(0, str(Path(__file__).parent))
