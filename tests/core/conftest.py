"""What tests of several files use, under a name that they can import."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("record_kit", Path(__file__).parent / "record_kit.py")
kit = importlib.util.module_from_spec(spec)
sys.modules["record_kit"] = kit
spec.loader.exec_module(kit)
