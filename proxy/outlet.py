"""What goes to the client: nothing before it is sure, then bytes as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Send

from engine.plugins.frontends._errors import HTTPError
from engine.plugins.frontends._wire import to_json

KEPT = ("content-type", "retry-after", "cache-control", "x-accel-buffering", "x-request-id")


class SlowReader(Exception):
    """The client takes nothing any more."""


class Outlet:
    """One answer. A client that reads nothing for ``patience`` seconds raises ``SlowReader``.

    Args:
        first: called with the seconds until the first byte.

    Attributes:
        started: the client has seen the beginning of an answer, so there is no other.
        ended: the last piece is on its way.
    """

    def __init__(self, send: Send, request_id: str, patience: float, first: Callable[[float], None]) -> None:
        self._send, self._patience, self._first = send, patience, first
        self._request_id = request_id
        self._begun = time.monotonic()
        self.started = self.ended = False

    async def begin(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        """The head of the answer."""
        kept = {"x-request-id": self._request_id, **{name: headers[name] for name in KEPT if name in headers}}
        if length is not None:
            kept["content-length"] = str(length)
        self.started = True
        self._first(time.monotonic() - self._begun)
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in kept.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def more(self, body: bytes) -> None:
        """A piece of it."""
        await self._put({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        """The last piece."""
        self.ended = True
        await self._put({"type": "http.response.body", "body": body, "more_body": False})

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """An answer in one piece."""
        await self.begin(status, headers, len(body))
        await self.end(body)

    async def fail(self, error: HTTPError) -> None:
        """An error: a whole answer, or the last event of a stream that has begun."""
        body = to_json(error.body())
        if self.started:
            await self.end(b"data: " + body + b"\n\n")
        else:
            await self.whole(error.status, {**_lower(error.headers), "content-type": "application/json"}, body)

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._send(message)
        except TimeoutError as error:
            raise SlowReader from error


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
