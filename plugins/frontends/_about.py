"""What a server says of its engine: how it is, and what it is."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from engine.core.serve.client import AsyncEngine
from engine.plugins.frontends._life import Life


def about(engine: AsyncEngine, name: str, incarnation: str, life: Life) -> dict[str, Any]:
    """All that whoever routes requests must know: role, model, pages, connectors with their addresses, state, health.

    Args:
        name: what clients call the model.
        incarnation: differs each time that the server is started.
    """
    limits = engine.limits
    return {
        "object": "engine",
        "version": version("sixhooks"),
        "incarnation": incarnation,
        "state": life.state.value,
        "role": engine.config.role,
        "model": name,
        "fingerprint": engine.model.fingerprint,
        "page_size": limits.page_size,
        "num_pages": limits.num_pages,
        "vocab_size": limits.vocab_size,
        "max_model_len": limits.max_model_len,
        "connectors": engine.description.get("connectors", {}),
        "health": life.describe(),
    }
