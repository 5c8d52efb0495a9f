"""NiceGUI in this process: loaded once, run only while pages are open. One for all dashboards: it is one itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI, Request
from starlette.types import Receive, Scope, Send

from engine.core.errors import ConfigError

log = logging.getLogger(__name__)

MISSING = "the dashboard needs NiceGUI 3: pip install 'sixhooks[dashboard]'"
TAKEN = "the dashboard needs NiceGUI for itself, and this process runs pages of its own with it"
LOOK_SECONDS = 5.0
LINGER = 2  # looks without a page in a row, after which it is stopped
SCENE = "engine.dashboard.scene"
"""Where a request's scope says what draws its page."""

FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="8" fill="#6366f1"/>'
    '<path d="M8 21h4v3H8zm6-6h4v9h-4zm6-7h4v16h-4z" fill="#fff"/></svg>'
)

_stage: list[Stage] = []


def check_installed() -> None:
    """Raise ``ConfigError`` where NiceGUI is not installed. Imports nothing."""
    if find_spec("nicegui") is None:
        raise ConfigError(MISSING)


class Stage:
    """NiceGUI as an ASGI application. Each page is drawn by what the request's scope has under ``SCENE``.

    It is started by the first page that is opened, and stopped some seconds after the last was closed: with it its
    timers go. Use ``stage()``: there is one.
    """

    def __init__(self) -> None:
        check_installed()
        import nicegui

        if nicegui.app.config.has_run_config:
            raise ConfigError(TAKEN)
        self._nicegui: Any = nicegui
        self._app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        nicegui.ui.page("/", title="Sixhooks", favicon=FAVICON)(_page)
        nicegui.ui.run_with(
            self._app, mount_path="/", tailwind=False, binding_refresh_interval=None, show_welcome_message=False,
            gzip_middleware_factory=None, cache_control_directives="private, max-age=31536000, immutable",
            reconnect_timeout=5.0, message_history_length=20, dark=None,
        )  # fmt: skip
        self._running: contextlib.AsyncExitStack | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, having started if need be."""
        if self._running is None or self._loop is not asyncio.get_running_loop():
            await self._start()
        await self._app(scope, receive, send)

    @property
    def running(self) -> bool:
        """Whether it is started."""
        return self._running is not None

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the one before was closed with all that ran in it
            self._running, self._loop, self._turn = None, loop, asyncio.Lock()
        async with self._turn:
            if self._running is None:
                running = contextlib.AsyncExitStack()
                await running.enter_async_context(self._alive())
                self._running = running
                self._watch = loop.create_task(self._watched(), name="dashboard watch")

    @contextlib.asynccontextmanager
    async def _alive(self) -> AsyncIterator[None]:
        """NiceGUI from its start to its end, by its own two functions.

        The lifespan that it gives its host does the same, and besides asks every object of the process whether it is
        the server: that takes long where there are many, and fails where one of them does not like to be asked.
        """
        from nicegui import nicegui

        await nicegui._startup()
        try:
            yield
        finally:
            await nicegui._shutdown()

    async def stop(self) -> None:
        """End all pages and timers. Idempotent."""
        if self._loop is not asyncio.get_running_loop():
            return
        async with self._turn:
            watch, self._watch = self._watch, None
            if watch is not None and watch is not asyncio.current_task():
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            await self._stop()

    async def _stop(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        for client in list(self._nicegui.Client.instances.values()):
            client.delete()
        await running.aclose()
        self._nicegui.app.remove_route("/favicon.ico")  # it adds another with each start

    async def _watched(self) -> None:
        """Stop when no page has been open for a while."""
        quiet = 0
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            quiet = 0 if self._nicegui.Client.instances else quiet + 1
            if quiet < LINGER:
                continue
            async with self._turn:
                if not self._nicegui.Client.instances:
                    self._watch = None
                    await self._stop()
                    return


def stage() -> Stage:
    """The stage of this process. Raises ``ConfigError`` where NiceGUI is missing, or somebody else's."""
    if not _stage:
        _stage.append(Stage())
    return _stage[0]


async def _page(request: Request) -> None:
    draw: Callable[[], Awaitable[None]] = request.scope[SCENE]
    await draw()
