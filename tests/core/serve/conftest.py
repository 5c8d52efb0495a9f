"""Engines to talk to, and an executor that fails on command."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine import AsyncEngine, EngineConfig

HERE = Path(__file__).parent


def sim_config(**fields: Any) -> EngineConfig:
    """A configuration without a model; ``options`` are those of the sim executor."""
    options = fields.pop("options", {})
    return EngineConfig.model_validate({"executor": {"name": "sim", **options}, **fields})


@pytest.fixture(scope="module", params=["thread", "process"])
def engine(request: pytest.FixtureRequest) -> Iterator[AsyncEngine]:
    """A running engine, in both of its forms. Each test must leave it idle."""
    engine = AsyncEngine.launch(sim_config(options={"step_ms": 1}, audit=True), in_process=request.param == "thread")
    yield engine
    assert engine.health().ok
    stats = asyncio.run(engine.stats())
    assert (stats["running"], stats["waiting"], stats["pages_pinned"]) == (0, 0, 0)
    engine.shutdown()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the failing executor, importable here and in child processes, as a user's local plugin is."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("faulty_executor")
