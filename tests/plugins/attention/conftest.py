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

# Where it is not installed one test says so by being skipped, not a hundred.
INSTALLED = ["library"] if importlib.util.find_spec("flashinfer") else []


@pytest.fixture(params=["stand-in", *INSTALLED])
def flashinfer_class(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Backend ``flashinfer`` on the stand-in; and on the library's wrappers, without what it would compile."""
    if request.param == "stand-in":
        yield flashinfer_kit.OnStandIn
        return
    with flashinfer_front.on_the_cpu() as library:
        yield flashinfer_kit.on(library)
