"""The decisions of an engine that runs elsewhere: the record, switched and written, and requests' stories."""

from __future__ import annotations

import asyncio
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.errors import UnknownRequest

if TYPE_CHECKING:
    from engine.core.serve.client import AsyncEngine

LOOK_SECONDS = 0.02  # between two looks whether a question is answered


class RecordClient:
    """``AsyncEngine.record``. Asked between two steps; what takes a while is done beside the engine's thread.

    Raises ``EngineDead`` as everything else does.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def status(self) -> dict[str, Any]:
        """Whether decisions are recorded, how much, and where: ``RecordDesk.status``."""
        return await self._engine.ask_record("status")

    async def on(self) -> dict[str, Any]:
        """Record from now on, as configured."""
        return await self._engine.ask_record("on")

    async def off(self) -> dict[str, Any]:
        """Record no more; what is in memory is forgotten."""
        return await self._engine.ask_record("off")

    async def write(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Write what is in memory as one log. Raises ``ConfigError`` where there is nothing, ``EngineError``."""
        return await self._finished(await self._engine.ask_record("write", path=str(Path(fspath(path)).absolute())))

    async def requests(self, most: int = 1000) -> dict[str, Any]:
        """Live requests: those that run, the queue in order with reasons, the parked; at most so many."""
        return await self._engine.ask_record("requests", most=most)

    async def explain(self, request_id: str) -> list[dict[str, Any]]:
        """The story of a request by its name in the engine, or of each that came under this id of a caller's.

        Raises:
            UnknownRequest: it does not live, and is not remembered.
        """
        names, found = self._engine.ledger.names_of(request_id), []
        for name in names:
            try:
                found.append(await self._finished(await self._engine.ask_record("explain", request=name)))
            except UnknownRequest:
                if name == names[-1] and not found:
                    raise
        return found

    async def _finished(self, begun: dict[str, Any]) -> dict[str, Any]:
        while not (answer := await self._engine.ask_record("done", job=begun["job"]))["done"]:
            await asyncio.sleep(LOOK_SECONDS)
        del answer["done"]
        return answer
