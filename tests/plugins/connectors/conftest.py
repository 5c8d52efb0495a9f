"""Fixtures of the connectors' tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("handoff_kit", Path(__file__).parent / "handoff_kit.py")
kit = importlib.util.module_from_spec(spec)
sys.modules["handoff_kit"] = kit
spec.loader.exec_module(kit)


@pytest.fixture(params=kit.MOVERS)
def mover(request):
    """How pages travel."""
    return request.param


@pytest.fixture(autouse=True)
def collected(request):
    """Engines with a real model leave mapped memory to the collector: it is gone before others count descriptors."""
    yield
    if request.node.get_closest_marker("model"):
        gc.collect()


@pytest.fixture
def opened():
    """Opens connectors, and closes them in the end: no thread and no file descriptor is left."""
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    stores = []

    def open_one(layout, mover="streamed", *, page_size=4, fingerprint="f", **options):
        store = kit.connector(mover, options)
        stores.append(store)
        store.start(kit.where(page_size, fingerprint))
        store.register(layout)
        return store

    yield open_one
    for store in stores:
        store.close()
    assert not kit.threads_left()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before
