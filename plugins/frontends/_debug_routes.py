"""The endpoints that explain decisions: live requests, a request's story, and the record."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec
from fastapi import Request
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from engine.core.serve.client import AsyncEngine
from engine.plugins.frontends._cache_routes import parsed
from engine.plugins.frontends._endpoints import Read, Route
from engine.plugins.frontends._wire import json_response


class RecordRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``/debug/record``: whether decisions are recorded from now on."""

    on: bool


BODIES: dict[str, type[msgspec.Struct]] = {"/debug/record": RecordRequest}


class DebugRoutes:
    """What can be asked of one engine's decisions over HTTP.

    Args:
        read: what a function makes of a request's body.
    """

    def __init__(self, engine: AsyncEngine, *, read: Read) -> None:
        self._engine, self._read = engine, read

    def routes(self) -> list[Route]:
        """Path, method, handler, and whether the API key guards it."""
        return [
            ("/debug/requests", "GET", self.requests, True),
            ("/debug/requests/{request_id:path}", "GET", self.explain, True),
            ("/debug/record", "GET", self.status, True),
            ("/debug/record", "POST", self.switch, True),
            ("/debug/record/log", "GET", self.log, True),
        ]

    async def requests(self, request: Request) -> Response:
        """Live requests: those that run, the queue in order with reasons, the parked."""
        return json_response(await self._engine.record.requests())

    async def explain(self, request: Request) -> Response:
        """Why a request waited, when it was computed, what it found cached: now, and as far as it is remembered.

        By its name in the engine, or by the ``X-Request-Id`` of the HTTP request that brought it.
        """
        name = request.path_params["request_id"]
        return json_response({"id": name, "requests": await self._engine.record.explain(name)})

    async def status(self, request: Request) -> Response:
        """Whether decisions are recorded, how much of them, and where."""
        return json_response(await self._engine.record.status())

    async def switch(self, request: Request) -> Response:
        """Record from now on, or no more."""
        wish = await self._read(request, lambda body: parsed(body, RecordRequest))
        return json_response(await (self._engine.record.on() if wish.on else self._engine.record.off()))

    async def log(self, request: Request) -> Response:
        """What is in memory, as a decision log (docs/record.md): one JSON object a line."""
        folder = Path(await run_in_threadpool(tempfile.mkdtemp, prefix="engine-log-"))
        try:
            written = await self._engine.record.write(folder / "log.jsonl")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return FileResponse(
            written["path"], media_type="application/jsonl", filename="decisions.jsonl",
            background=BackgroundTask(shutil.rmtree, folder, ignore_errors=True),
        )  # fmt: skip
