"""The live page of a server at ``/dashboard``: steps, queue, pages, tree, hit rate, hooks. Nothing runs while nobody
looks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from engine.core.errors import EngineError
from engine.core.keys import Keys
from engine.core.serve.client import AsyncEngine
from engine.plugins.frontends._dashboard_feed import Feed
from engine.plugins.frontends._dashboard_frame import Frame
from engine.plugins.frontends._dashboard_guard import Guard
from engine.plugins.frontends._dashboard_page import Page
from engine.plugins.frontends._dashboard_stage import SCENE, stage

PATH = "/dashboard"


class Dashboard:
    """The dashboard of one engine.

    Args:
        name: what clients call the model.
        keys: who may see it; ``None``: everybody.
        life: what the server says of its health.

    Raises:
        ConfigError: NiceGUI is missing, or somebody else's in this process.
    """

    def __init__(
        self, engine: AsyncEngine, *, name: str, keys: Keys | None, life: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._engine, self._name, self._life, self._guarded = engine, name, life, keys is not None
        self._tree: bool | None = None
        self._stage = stage()
        self.feed = Feed(engine, life)
        self.guard = Guard(self._played, PATH, keys)

    def mount(self, app: FastAPI) -> None:
        """Answer under ``/dashboard``. Mutates the application."""
        app.router.routes += [Route(PATH, self.guard), Mount(PATH, self.guard)]

    async def close(self) -> None:
        """End the open pages, and look at the engine no more. Idempotent."""
        await self.feed.close()
        await self._stage.stop()

    async def _played(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SCENE] = self._draw
        await self._stage(scope, receive, send)

    async def _draw(self) -> None:
        first = Frame(self._life(), self._engine.description)
        Page(self.feed, self._name, first, has_tree=await self._has_tree(), guarded=self._guarded)

    async def _has_tree(self) -> bool:
        if self._tree is None:
            try:
                self._tree = (await self._engine.ask_lens("about"))["tree"]
            except EngineError:  # it is gone, or a step takes long: the page says so
                return False
        return self._tree
