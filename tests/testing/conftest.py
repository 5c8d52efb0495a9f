"""What the tests of suites share: ``mutant_kit``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
try:
    import mutant_kit  # noqa: F401
finally:
    sys.path.pop(0)
