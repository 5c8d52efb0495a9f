"""The HTTP interface of an engine inside another application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine._inputs import configure
from engine.core.keys import guarded
from engine.core.protocols import Frontend
from engine.core.registry import Registry, build
from engine.core.serve.client import AsyncEngine


def http_app(
    engine: AsyncEngine, *, frontend: str | Mapping[str, Any] | None = None, api_key: str | None = None
) -> Any:
    """The HTTP interface of a running engine as an ASGI application, to mount in another one.

    It opens no socket, handles no signal and owns nothing: the host starts and closes the engine, in its lifespan.

    Args:
        frontend: a name, or a table with its options, e.g. ``{"name": "openai", "served_model_name": "mine"}``
            (default: the frontend of the engine's configuration).
        api_key: what clients must send as bearer token (default: one of the keys of the engine's configuration,
            ``api_key`` and ``api_key_file``, which is read once; where it has none, whoever reaches the host may ask).

    Raises:
        ConfigError, PluginError: no such frontend, a wrong option, one that cannot be mounted or does not know several
            keys, an empty key, a file of keys that cannot be used.

    Example::

        @asynccontextmanager
        async def lifespan(app):
            async with await AsyncEngine.start(config) as engine:
                app.mount("/llm", http_app(engine))
                yield
    """
    chosen = engine.config.frontend if frontend is None else configure(None, None, {"frontend": frontend}).frontend
    plugin = build(Registry().select("frontend", chosen.name), chosen)
    assert isinstance(plugin, Frontend)
    return plugin.app(engine, api_key=guarded(plugin, engine.config) if api_key is None else api_key)
