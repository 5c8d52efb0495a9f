"""The OpenAI HTTP interface: completions and chat, streamed or not, with health and metrics."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import Field

from engine.core.errors import ConfigError
from engine.core.protocols import Frontend, PluginOptions, ToolParser
from engine.core.registry import Registry, build
from engine.core.serve.client import AsyncEngine
from engine.plugins.frontends._openai_routes import Routes
from engine.plugins.frontends._server import Server, bind, serving, url_of

WATCH_SECONDS = 0.2
EXIT_ENGINE_DEAD = 1


class OpenAIOptions(PluginOptions):
    """Options of the frontend ``openai``."""

    served_model_name: str | None = Field(None, description="name that clients use for the model (default: its own)")
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="largest request body; more is answered with 413")
    engine_death_grace_s: float = Field(
        30.0, ge=0, description="seconds to answer 503 after the engine died, then exit"
    )
    shutdown_grace_s: float = Field(5.0, ge=0, description="seconds that open requests have to end after SIGTERM")
    slow_reader_s: float = Field(60.0, gt=0, description="a client that reads nothing for so long is let go")


class OpenAIFrontend(Frontend):
    """Serves the OpenAI interface over HTTP (FastAPI, uvicorn)."""

    name: ClassVar[str] = "openai"
    Options: ClassVar[type[PluginOptions]] = OpenAIOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._parsers: list[ToolParser] = []

    def serve(self, engine: AsyncEngine, *, host: str, port: int, api_key: str | None = None) -> int:
        """Serve until SIGINT or SIGTERM (exit code 0), or until the engine has died (exit code 1).

        Prints ``listening on http://HOST:PORT`` once connections are accepted; port 0 takes any free one.

        Raises:
            ConfigError: the address cannot be used, or the key is empty.
        """
        app = self.app(engine, api_key=api_key)
        with bind(host, port) as sock:
            return asyncio.run(self._serve(engine, sock, app))

    def app(self, engine: AsyncEngine, *, api_key: str | None = None) -> FastAPI:
        """The interface as an application to mount. Raises ``ConfigError`` where the key is empty."""
        if api_key is not None and not api_key.strip():
            raise ConfigError("the API key is empty, which would protect nothing: use None for an open server")
        options: OpenAIOptions = self.options
        selection = engine.config.tool_parser
        parser = build(Registry().select("tool_parser", selection.name), selection)
        assert isinstance(parser, ToolParser)
        self._parsers.append(parser)
        routes = Routes(
            engine,
            parser,
            name=options.served_model_name or engine.model.name,
            api_key=api_key,
            max_body_bytes=options.max_body_bytes,
            slow_reader_s=options.slow_reader_s,
        )
        return routes.app()

    def close(self) -> None:
        """Close the parsers of tool calls that it has made."""
        parsers, self._parsers = self._parsers, []
        for parser in parsers:
            parser.close()

    async def _serve(self, engine: AsyncEngine, sock: socket.socket, app: FastAPI) -> int:
        options: OpenAIOptions = self.options
        async with serving(app, sock, grace=options.shutdown_grace_s) as (server, task):
            print(f"listening on {url_of(sock)} (described at {url_of(sock)}/openapi.json)", flush=True)
            return await watch(engine, server, task, options.engine_death_grace_s)


async def watch(engine: AsyncEngine, server: Server, task: asyncio.Task[None], grace: float) -> int:
    """Wait for the end, which is also that of ``task``. A dead engine does not come back: clients are told
    for a while, then a supervisor must act."""
    loop = asyncio.get_running_loop()
    died_at: float | None = None
    while not (server.should_exit or task.done()):
        await asyncio.sleep(WATCH_SECONDS)
        if engine.health().ok:
            continue
        died_at = died_at or loop.time()
        if loop.time() - died_at >= grace:
            server.should_exit = True
    return 0 if died_at is None else EXIT_ENGINE_DEAD
