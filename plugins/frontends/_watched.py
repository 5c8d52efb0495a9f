"""What is counted and logged of every HTTP request, around the application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.plugins.frontends._life import Life
from engine.plugins.frontends._wire import CLIENT_CLOSED

requests_log = logging.getLogger("engine.requests")
UNKNOWN = "unknown"
PIECE = 128 * 1024  # bytes of an answer that are handed on at once; the next ones wait until the client has read


class Answered:
    """Counts of HTTP requests by the route's path and the status. Bounded: a path that is no route is ``unknown``.

    Status 499 is a client that left before its answer was complete.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()

    def add(self, path: str, status: int) -> None:
        """One more. Mutates."""
        self.counts[path, status] += 1


class Watched:
    """ASGI middleware: every request is counted once, when it has ended; those with a body count as work meanwhile.

    Large answers are sent piece by piece, so that none lies in memory for a client that does not read: one that does
    not take a piece, or a part of a stream, within ``patience`` seconds is let go.
    """

    def __init__(self, app: ASGIApp, *, life: Life, answered: Answered, patience: float, log: bool) -> None:
        self._app, self._life, self._answered, self._log = app, life, answered, log
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, complete = time.monotonic(), CLIENT_CLOSED, False

        async def put(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            if message.get("more_body", False):
                await self._send(send, pieces_of(message))
            else:
                for piece in pieces_of(message):
                    await self._send(send, (piece,))
            complete = complete or (message["type"] == "http.response.body" and not message.get("more_body", False))

        try:
            if scope["method"] == "POST":
                with self._life.answering():
                    await self._app(scope, receive, put)
            else:
                await self._app(scope, receive, put)
        except TimeoutError:
            complete = False  # the connection is stuck, and closed: there is nobody to tell
        finally:
            said = status if complete else CLIENT_CLOSED
            self._answered.add(path_of(scope), said)
            if self._log:
                log_request(scope, said, time.monotonic() - began)

    async def _send(self, send: Send, pieces: Iterable[Message]) -> None:
        # Not wait_for: before Python 3.12 it swallows a cancellation that comes as the send completes.
        async with asyncio.timeout(self._patience):
            for piece in pieces:
                await send(piece)
                if len(piece.get("body", b"")) >= PIECE // 2:  # whoever reads it as fast never makes us wait
                    await asyncio.sleep(0)


def pieces_of(message: Message) -> Iterator[Message]:
    """The same in pieces."""
    body = message.get("body", b"")
    if len(body) <= PIECE:
        yield message
        return
    for at in range(0, len(body), PIECE):
        more = message.get("more_body", False) or at + PIECE < len(body)
        yield {"type": message["type"], "body": body[at : at + PIECE], "more_body": more}


def log_prompts(request_id: str, texts: Sequence[str | None], tokens: Sequence[Sequence[int]]) -> None:
    """What was asked, as text where it came as text, else as token ids. For those who have asked for it."""
    for text, ids in zip(texts, tokens, strict=True):
        requests_log.info("prompt of %s: %s", request_id, list(ids) if text is None else repr(text))


def path_of(scope: Scope) -> str:
    """The path of the route that has answered."""
    path: str = getattr(scope.get("route"), "path", UNKNOWN)
    return path


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """One line: nothing of a body, nothing of a header but the request's id."""
    state: dict[str, Any] = scope.get("state") or {}
    requests_log.info(
        "%s %s %d %.3f s id=%s tenant=%s", scope["method"], path_of(scope), status, seconds, state.get("id", "-"),
        state.get("tenant") or "-",
    )  # fmt: skip
