"""Large answers written a piece at a time, for nothing else runs in this process while a call writes; and sent as they
are: joined, they would fill memory twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.plugins.frontends._wire import to_json

ITEMS = 64  # of a list that are written in one go
CHUNK = 128 * 1024  # bytes that are sent in one go


class InPieces(Response):
    """A JSON answer of which each piece is forgotten when it is sent."""

    media_type = "application/json"

    def __init__(self, value: Any, headers: dict[str, str]) -> None:
        self.status_code, self.background, self.body = 200, None, b""
        self._pieces = deque(chunks(value))
        self.init_headers({**headers, "content-length": str(sum(map(len, self._pieces)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while self._pieces:
            piece = self._pieces.popleft()
            await send({"type": "http.response.body", "body": piece, "more_body": bool(self._pieces)})


def chunks(value: Any) -> Iterator[bytes]:
    """A value's JSON text, in pieces of a size to be sent."""
    some: list[bytes] = []
    size = 0
    for piece in _slices(value):
        some.append(piece)
        size += len(piece)
        if size >= CHUNK:
            yield b"".join(some)
            some, size = [], 0
    if some:
        yield b"".join(some)


def _slices(value: Any) -> Iterator[bytes]:
    """In pieces that are quick to write: objects and lists of them are looked into, long lists written in parts."""
    if isinstance(value, dict) and value:
        for number, (name, inner) in enumerate(value.items()):
            yield (b"," if number else b"{") + to_json(name) + b":"
            yield from _slices(inner)
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, inner in enumerate(value):
            yield b"," if number else b"["
            yield from _slices(inner)
        yield b"]"
    elif isinstance(value, list) and len(value) > ITEMS:
        for at in range(0, len(value), ITEMS):
            yield (b"," if at else b"[") + to_json(value[at : at + ITEMS])[1:-1]
        yield b"]"
    else:
        yield to_json(value)
