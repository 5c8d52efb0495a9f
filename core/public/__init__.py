"""Sixhooks: an LLM serving engine made of plugins. ``from engine import LLM`` is the way in.

Names are loaded when they are first used, so that importing ``engine`` (as every plugin does) costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.core.config import EngineConfig
    from engine.core.errors import (
        ConfigError,
        EngineDead,
        EngineError,
        InvalidRequest,
        ModelError,
        PluginError,
        QueueFull,
    )
    from engine.core.grammar import Grammar
    from engine.core.outputs import Chunk, Completion, Embedding
    from engine.core.pooling import Pooling
    from engine.core.sampling import SamplingParams, TokenLogprobs
    from engine.core.serve.client import AsyncEngine
    from engine.http import http_app
    from engine.llm import LLM

__all__ = [
    "LLM",
    "AsyncEngine",
    "Chunk",
    "Completion",
    "ConfigError",
    "Embedding",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "Grammar",
    "InvalidRequest",
    "ModelError",
    "PluginError",
    "Pooling",
    "QueueFull",
    "SamplingParams",
    "TokenLogprobs",
    "http_app",
]

_HOMES = {
    "LLM": "engine.llm",
    "AsyncEngine": "engine.core.serve.client",
    "Chunk": "engine.core.outputs",
    "Completion": "engine.core.outputs",
    "Embedding": "engine.core.outputs",
    "EngineConfig": "engine.core.config",
    "Grammar": "engine.core.grammar",
    "Pooling": "engine.core.pooling",
    "SamplingParams": "engine.core.sampling",
    "TokenLogprobs": "engine.core.sampling",
    "http_app": "engine.http",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "engine.core.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
