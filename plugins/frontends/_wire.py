"""Bytes in, bytes out: bounded bodies, server-sent events, and clients that leave at any moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.core.keys import Keys
from engine.plugins.frontends._errors import HTTPError, come_again

T = TypeVar("T")
CLIENT_CLOSED = 499  # the status of a request whose client has left, which nobody sees but metrics and logs
DRAIN_BYTES = 64 * 2**20  # a refused body up to this size is read and dropped, so that the client sees the answer


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


class Held:
    """How many bytes of bodies are in memory, of all requests that are being read, and how many may be."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.bytes = 0

    @contextlib.contextmanager
    def lease(self) -> Iterator[Lease]:
        """A request's own part, given back in the end."""
        lease = Lease(self)
        try:
            yield lease
        finally:
            self.bytes -= lease.bytes

    @property
    def full(self) -> bool:
        """Whether there is no room for more."""
        return self.bytes > self._most


class Lease:
    """What one request holds."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self.bytes = 0

    def take(self, count: int) -> bool:
        """So many bytes more. Returns whether there was room for them. Mutates."""
        self.bytes += count
        self._held.bytes += count
        return not self._held.full


async def read_body(request: Request, limit: int, patience: float, lease: Lease) -> bytes:
    """The request's body.

    Args:
        patience: seconds in which something of it must come.

    Raises:
        HTTPError: 413 above ``limit`` bytes, which are never held in memory; 503 where too much of other bodies is
            there; 408 where it does not come.
        ClientGone: the client left in the middle of it.
    """
    declared = request.headers.get("content-length", "")
    too_large = HTTPError(
        413, f"the body is above the limit of {limit} bytes (max_body_bytes)", param="body", code="body_too_large"
    )
    if declared.isdigit() and int(declared) > DRAIN_BYTES:
        raise too_large
    pieces: list[bytes] = []
    size, room = 0, True
    async for piece in _patiently(request, patience):
        size += len(piece)
        room = room and (size > limit or lease.take(len(piece)))
        if size <= limit and room:
            pieces.append(piece)
        else:
            pieces.clear()
            if size > DRAIN_BYTES:
                break
    if size > limit:
        raise too_large
    if not room:
        words = "too many large bodies are being read: try again later"
        raise HTTPError(503, words, "server_error", code="bodies_full", headers=come_again(None))
    return b"".join(pieces)


async def _patiently(request: Request, patience: float) -> AsyncIterator[bytes]:
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(patience):
                piece = await anext(stream, None)
        except ClientDisconnect as error:
            raise ClientGone from error
        except TimeoutError as error:
            words = f"nothing of the body has come for {patience:g} s"
            raise HTTPError(408, words, "timeout_error", "body", "body_timeout", {"Connection": "close"}) from error
        if piece is None:
            return
        yield piece


def authorize(request: Request, keys: Keys | None) -> str:
    """The label of the key that the request carries. ``None``: nobody needs one. Raises ``HTTPError`` 401."""
    if keys is None:
        return ""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    holder = keys.holder(given.strip()) if scheme.lower() == "bearer" else None
    if holder is not None:
        return holder
    words = "the API key is wrong" if given else "an API key is required: Authorization: Bearer KEY"
    raise HTTPError(401, words, "authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves. Raises ``ClientGone``."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for other in (task, gone):
            other.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)  # their results were taken above


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. ``leave`` is called at the end, whoever ended it: the last event, the client, a shutdown, or
    whoever sends, with a ``TimeoutError``, since the reader takes nothing (``Watched``).
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any] | str],
        leave: Callable[[], None],
        *,
        headers: dict[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._events, self._leave = events, leave
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        """A stream has no length."""
        super().init_headers(headers)
        self.raw_headers = [(key, value) for key, value in self.raw_headers if key != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop when the client leaves."""
        try:
            await until_gone(receive, self._send_all(send))
        except (ClientGone, TimeoutError):
            return  # the connection is closed or stuck: there is nothing left to say
        finally:
            self._leave()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": framed(event), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def framed(event: dict[str, Any] | str) -> bytes:
    """One server-sent event. What has a type of OpenAI's responses is sent under its name, too."""
    if isinstance(event, str):
        return b"data: " + event.encode() + b"\n\n"
    name = b"event: " + str(event["type"]).encode() + b"\n" if "sequence_number" in event else b""
    return name + b"data: " + to_json(event) + b"\n\n"


def to_json(value: Any) -> bytes:
    """JSON text. NaN and infinities, which JSON does not have, become null."""
    return msgspec.json.encode(value)


def written(value: Any) -> msgspec.Raw:
    """JSON text that stands in a larger one."""
    return msgspec.Raw(to_json(value))


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A whole JSON answer."""
    return Response(to_json(value), status, headers, "application/json")
