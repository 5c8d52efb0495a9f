"""The OpenAI HTTP interface: completions and chat, streamed or not, with health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any, ClassVar

from fastapi import FastAPI
from pydantic import Field

from engine.core.errors import ConfigError
from engine.core.keys import Keys
from engine.core.protocols import Frontend, PluginOptions, ToolParser
from engine.core.registry import make
from engine.core.serve.client import AsyncEngine
from engine.core.serve.garbage import Sweep
from engine.plugins.frontends._aside import quick
from engine.plugins.frontends._bounds import MOST_PARTS
from engine.plugins.frontends._dashboard import PATH
from engine.plugins.frontends._dashboard_stage import check_installed
from engine.plugins.frontends._door import Door
from engine.plugins.frontends._life import Life
from engine.plugins.frontends._openai_routes import Routes
from engine.plugins.frontends._server import Server, bind, serving, url_of
from engine.plugins.frontends._tracing import Tracing

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.2
DRAIN_POLL = 0.02
FLUSH_SECONDS = 1.0  # for the last events of streams to go out, once there is nothing else to wait for
EXIT_ENGINE_DEAD = 1


class OpenAIOptions(PluginOptions):
    """Options of the frontend ``openai``."""

    served_model_name: str | None = Field(None, description="name that clients use for the model (default: its own)")
    max_body_bytes: int = Field(8 * 2**20, ge=1024, description="largest request body; more is answered with 413")
    max_body_parts: int = Field(MOST_PARTS, ge=64, description="most lists and objects in a request body")
    engine_death_grace_s: float = Field(
        30.0, ge=0, description="seconds to answer 503 after the engine died, then exit"
    )
    slow_reader_s: float = Field(60.0, gt=0, description="a client that reads nothing for so long is let go")
    dashboard: bool = Field(False, description="serve a live page at /dashboard (needs sixhooks[dashboard])")
    open_paths: tuple[str, ...] = Field((), description="paths that need no API key, e.g. /health/ready,/metrics")


class OpenAIFrontend(Frontend):
    """Serves the OpenAI interface over HTTP (FastAPI, uvicorn)."""

    name: ClassVar[str] = "openai"
    Options: ClassVar[type[PluginOptions]] = OpenAIOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._parsers: list[ToolParser] = []
        self._keys: Keys | None = None
        self._door: Door | None = None

    def guard(self, keys: Keys) -> None:
        """Ask for one of these keys; SIGHUP reads their file again, where they have one."""
        self._keys = keys

    def open(self, *, host: str, port: int) -> None:
        """Listen, and say that the server is starting. Raises ``ConfigError``, also where the dashboard is wanted and
        cannot be."""
        if self.options.dashboard:
            check_installed()
        sock = bind(host, port)
        self._door = Door(sock)
        print(f"starting   {url_of(sock)}/health/ready says when it is ready", flush=True)

    def close(self) -> None:
        """Give back the address, where ``serve`` was never called, and close the parsers that it has made."""
        parsers, self._parsers = self._parsers, []
        for parser in parsers:
            parser.close()
        if self._door is not None:
            self._door.close()

    def serve(self, engine: AsyncEngine, *, host: str, port: int, api_key: str | None = None) -> int:
        """Serve until SIGINT or SIGTERM (exit code 0), or until the engine has died (exit code 1).

        Prints ``listening on http://HOST:PORT`` once requests are accepted; port 0 takes any free one.

        Raises:
            ConfigError: the address cannot be used, or the key is empty.
        """
        routes = self._routes(engine, api_key)
        app = routes.app()
        door, self._door = self._door, None
        with quick(), bind(host, port) if door is None else door.hand_over() as sock:
            return asyncio.run(self._serve(engine, sock, app, routes))

    def app(self, engine: AsyncEngine, *, api_key: str | None = None) -> FastAPI:
        """The interface as an application to mount. Raises ``ConfigError`` where the key is empty."""
        return self._routes(engine, api_key).app()

    def _routes(self, engine: AsyncEngine, api_key: str | None) -> Routes:
        if api_key is not None and not api_key.strip():
            raise ConfigError("the API key is empty, which would protect nothing: use None for an open server")
        options: OpenAIOptions = self.options
        selection = engine.config.tool_parser
        parser = make("tool_parser", selection.name, selection.options)
        assert isinstance(parser, ToolParser)
        self._parsers.append(parser)
        return Routes(
            engine,
            parser,
            name=options.served_model_name or engine.model.name,
            keys=self._keys if api_key is None else Keys([api_key]),
            max_body_bytes=options.max_body_bytes,
            max_body_parts=options.max_body_parts,
            slow_reader_s=options.slow_reader_s,
            open_paths=options.open_paths,
            dashboard=options.dashboard,
        )

    async def _serve(self, engine: AsyncEngine, sock: socket.socket, app: FastAPI, routes: Routes) -> int:
        options: OpenAIOptions = self.options
        grace, drain = options.engine_death_grace_s, engine.config.drain_timeout
        reload = self._reload if self._keys is not None and self._keys.from_file else None
        with traced(engine):
            async with routes, serving(app, sock, grace=FLUSH_SECONDS, drains=True, reload=reload) as (server, task):
                if reload is not None:
                    reload()  # the file may have changed while the model was loaded
                print(f"listening on {url_of(sock)} (described at {url_of(sock)}/openapi.json)", flush=True)
                if options.dashboard:
                    print(f"dashboard  {url_of(sock)}{PATH}", flush=True)
                return await watch(engine, server, task, routes, grace=grace, drain=drain)

    def _reload(self) -> None:
        """SIGHUP: read the keys again. What cannot be read changes nothing."""
        assert self._keys is not None
        try:
            self._keys.reload()
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)
        else:
            log.warning("%d API keys are in force", len(self._keys))


@contextlib.contextmanager
def traced(engine: AsyncEngine) -> Iterator[None]:
    """While inside, requests that end are traced, if the configuration says where to. Raises ``ConfigError``."""
    if engine.config.otel is None:
        yield
        return
    tracing = Tracing.to(engine.config.otel, f"sixhooks {engine.model.name}")
    engine.ledger.closed.append(tracing.ended)
    try:
        yield
    finally:
        engine.ledger.closed.remove(tracing.ended)
        tracing.close()


async def watch(
    engine: AsyncEngine, server: Server, task: asyncio.Task[None], routes: Routes, *, grace: float, drain: float
) -> int:
    """Wait for the end, which is also that of ``task``: told to stop, the server drains; a dead engine does not come
    back, so clients are told for a while, and then a supervisor must act. Returns the exit code."""
    loop = asyncio.get_running_loop()
    died_at: float | None = None
    sweep = Sweep()
    while not (server.should_exit or task.done()):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WATCH_SECONDS):
                await server.told.wait()
        sweep.look(busy=routes.aside.busy)
        if not engine.health().ok:
            died_at = died_at or loop.time()
            if server.told.is_set() or loop.time() - died_at >= grace:
                server.should_exit = True
        elif server.told.is_set():
            await drained(server, routes.life, drain)
    return 0 if engine.health().ok else EXIT_ENGINE_DEAD


async def drained(server: Server, life: Life, seconds: float) -> None:
    """Refuse new requests and let those that are open end; after so many seconds end them. Then stop the server."""
    life.drain()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while life.busy and loop.time() < deadline and not server.should_exit:
        await asyncio.sleep(DRAIN_POLL)
    life.end_all()
    server.should_exit = True
