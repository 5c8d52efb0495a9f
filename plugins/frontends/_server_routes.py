"""The endpoints that say how a server is: health, metrics, what its engine is."""

from __future__ import annotations

import asyncio
import logging
import secrets

from fastapi import Request
from starlette.responses import Response

from engine.core.errors import EngineError
from engine.core.serve.client import AsyncEngine
from engine.plugins.frontends._about import about
from engine.plugins.frontends._endpoints import PROMETHEUS, Route
from engine.plugins.frontends._life import Life
from engine.plugins.frontends._metrics import Metrics
from engine.plugins.frontends._wire import json_response

log = logging.getLogger(__name__)

SCRAPE_SECONDS = 3.0  # for the engine to answer; who scrapes gives up after some ten, and must see that it is not ready


class ServerRoutes:
    """What can be asked of a server without asking its model anything.

    Args:
        name: what clients call the model.
    """

    def __init__(self, engine: AsyncEngine, *, name: str, life: Life, metrics: Metrics) -> None:
        self._engine, self._name, self._life, self._metrics = engine, name, life, metrics
        self._incarnation = secrets.token_hex(8)

    def routes(self) -> list[Route]:
        """Path, method, handler, and whether the API key guards it: all but liveness."""
        return [
            ("/v1/engine", "GET", self.describe, True),
            ("/health/live", "GET", self.live, False),
            ("/health/ready", "GET", self.ready, True),
            ("/health", "GET", self.health, True),
            ("/metrics", "GET", self.scrape, True),
        ]

    async def describe(self, request: Request) -> Response:
        """What this engine is, for whoever routes requests. Always 200."""
        return json_response(about(self._engine, self._name, self._incarnation, self._life))

    async def live(self, request: Request) -> Response:
        """200: this process answers. Says nothing of the engine."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 while requests are accepted and get on, else 503 with the state and the cause."""
        said = self._life.describe()
        return json_response(said, 200 if said["ready"] else 503)

    async def health(self, request: Request) -> Response:
        """The same as ``/health/ready``."""
        return await self.ready(request)

    async def scrape(self, request: Request) -> Response:
        """Prometheus metrics. Never fails because of the engine: what it does not say soon is left out."""
        measures = None
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                measures = await self._engine.measures()
        except TimeoutError:
            log.warning("metrics without the engine's part: it did not answer within %g s", SCRAPE_SECONDS)
        except EngineError as error:
            log.warning("metrics without the engine's part: %s", error)
        return Response(self._metrics.render(self._engine, self._life, measures), media_type=PROMETHEUS)
