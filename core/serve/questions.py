"""Questions to an engine core, each with a number of its own, answered by messages with that number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from engine.core import errors
from engine.core.errors import EngineDead, EngineError, InvalidRequest
from engine.core.serve.messages import AskDesk, AskStats, Command, DeskAnswer, Stats, Updated, UpdateWeights

Question = type[AskStats] | type[AskDesk] | type[UpdateWeights]
SOON_SECONDS = 10.0  # a long step answers when it ends


class Questions:
    """Those that are open. Belongs to one event loop.

    Args:
        begin: called before each: binds the loop, and raises ``EngineDead`` where nobody would answer.
        send: a command to the core.
    """

    def __init__(self, begin: Callable[[], None], send: Callable[[Command], None]) -> None:
        self._begin, self._send = begin, send
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, question: Question, *fields: Any) -> Any:
        """Send one, and wait for its answer. Raises ``EngineDead``."""
        self._begin()
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        try:
            self._send(question(number, *fields))
            return await future
        finally:
            self._open.pop(number, None)

    async def soon(self, question: Question, *fields: Any) -> Any:
        """``ask`` what is answered between two steps. Raises ``EngineError`` where a step takes too long."""
        try:
            async with asyncio.timeout(SOON_SECONDS):
                return await self.ask(question, *fields)
        except TimeoutError as error:
            raise EngineError(f"the engine did not answer within {SOON_SECONDS:g} s") from error

    async def desk(self, desk: str, what: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Ask one of the core's desks. Raises what it answered with."""
        answer: DeskAnswer = await self.soon(AskDesk, desk, what, options)
        if answer.value is None:
            if answer.kind == "InvalidRequest":
                raise InvalidRequest(answer.field, answer.message)
            raise error_of(answer)
        return answer.value

    def answered(self, answer: Stats | DeskAnswer | Updated) -> None:
        """An answer came. Mutates."""
        future = self._open.get(answer.number)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, words: str) -> None:
        """Nobody will answer any more. Mutates."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(EngineDead(words))


def error_of(answer: DeskAnswer | Updated) -> EngineError:
    """The error that the core answered with."""
    kind: type[EngineError] = getattr(errors, answer.kind, EngineError)
    return kind(answer.message)
