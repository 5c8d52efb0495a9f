"""What the tests of attention backends share: FlashInfer's stand-in, and its own wrappers where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
try:
    import flashinfer_front
    import flashinfer_kit
finally:
    sys.path.pop(0)

WHY_NOT = "flashinfer is not installed: 855 MB"


@pytest.fixture(params=["stand-in", "library"])
def flashinfer_class(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Backend ``flashinfer`` on the stand-in; and on the library's wrappers, without what it would compile."""
    if request.param == "stand-in":
        yield flashinfer_kit.OnStandIn
        return
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip(WHY_NOT)
    with flashinfer_front.on_the_cpu() as library:
        yield flashinfer_kit.on(library)
