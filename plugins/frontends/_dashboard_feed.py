"""Looks through an engine's lens about once a second, for all who watch, and only while somebody does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from engine.core.errors import EngineDead, EngineError
from engine.core.serve.client import AsyncEngine
from engine.plugins.frontends._dashboard_frame import Frame, History

log = logging.getLogger(__name__)

EVERY = 1.0  # seconds between two looks
LOOK_SECONDS = 3.0  # for the engine to answer


class Viewer(Protocol):
    """An open page."""

    def show(self, frame: Frame) -> None:
        """Draw a moment."""


class Feed:
    """Brings frames to those who watch one engine. Belongs to one event loop.

    Args:
        life: what the server says of its health.
        every: seconds between two looks.

    Attributes:
        viewers: who watches.
        looks: how many times the engine was looked at.
    """

    def __init__(self, engine: AsyncEngine, life: Callable[[], Mapping[str, Any]], every: float = EVERY) -> None:
        self._engine, self._life, self._every = engine, life, every
        self.viewers: list[Viewer] = []
        self.looks = 0
        self._frame: Frame | None = None
        self._task: asyncio.Task[None] | None = None
        self._left = asyncio.Event()

    @property
    def watching(self) -> bool:
        """Whether it looks."""
        return self._task is not None

    def join(self, viewer: Viewer) -> None:
        """One more watches. It is shown the newest frame at once, if there is one. Mutates."""
        if viewer not in self.viewers:
            self.viewers.append(viewer)
        if self._task is None or self._task.get_loop() is not asyncio.get_running_loop():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="dashboard feed")
        elif self._frame is not None:
            viewer.show(self._frame)

    def leave(self, viewer: Viewer) -> None:
        """One watches no more; with the last one it ends. Idempotent. Mutates."""
        if viewer in self.viewers:
            self.viewers.remove(viewer)
        if not self.viewers:
            self._left.set()

    async def close(self) -> None:
        """End it, whoever watches. Idempotent."""
        self.viewers.clear()
        self._left.set()
        task = self._task
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            await task

    # ---- inside

    async def _run(self) -> None:
        try:
            while self.viewers:
                await self._follow()
        finally:
            self._task = self._frame = None

    async def _follow(self) -> None:
        """Look until nobody watches, and then say so to the engine."""
        self._left = left = asyncio.Event()
        history = History(self._engine)
        while self.viewers:
            self._frame = frame = history.frame(self._life(), await self._looked(history.step))
            for viewer in list(self.viewers):
                try:
                    viewer.show(frame)
                except Exception:
                    log.exception("a page of the dashboard could not be drawn: it is shown no more")
                    self.leave(viewer)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every):
                    await left.wait()
        with contextlib.suppress(EngineError, TimeoutError):  # a lens that nobody looks through closes by itself
            async with asyncio.timeout(LOOK_SECONDS):
                await self._engine.ask_lens("close")

    async def _looked(self, since: int) -> dict[str, Any] | None:
        self.looks += 1
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                return await self._engine.ask_lens("look", since=since)
        except (EngineDead, TimeoutError):
            return None  # its state says so
        except EngineError as error:
            log.warning("the dashboard could not look at the engine: %s", error)
            return None
