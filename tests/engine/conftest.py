"""Owns how the tests of the engine find their helpers, and those of plans and transports."""

from __future__ import annotations

import sys
from pathlib import Path

# With --import-mode=importlib a test's folder is not on the path, and two helper modules may bear the same name.
_TESTS = Path(__file__).parent.parent
for folder in (_TESTS, _TESTS / "transport", _TESTS / "plan", _TESTS / "engine"):
    sys.path.insert(0, str(folder))
