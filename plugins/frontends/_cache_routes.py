"""The endpoints of the cache: numbers, reasons, a flush, and its events as server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from engine.core.cache_events import CacheBatch, TooOld, plain
from engine.core.errors import InvalidRequest
from engine.core.serve.cache import CacheReader
from engine.core.serve.client import AsyncEngine
from engine.plugins.frontends._endpoints import Read, Route
from engine.plugins.frontends._errors import HTTPError
from engine.plugins.frontends._wire import EventStream, json_response

MAX_SEQUENCE = 2**63


class ExplainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``/v1/cache/explain``: a prompt as text or token ids, and what separates cached content."""

    prompt: str | list[int]
    cache_salt: str = ""
    adapter: str = ""


class FlushRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of ``/v1/cache/flush``; may be left out."""

    tiers: bool = False


BODIES: dict[str, type[msgspec.Struct]] = {"/v1/cache/explain": ExplainRequest, "/v1/cache/flush": FlushRequest}


class CacheRoutes:
    """What can be asked of one engine's cache over HTTP.

    Args:
        read: what a function makes of a request's body.
        failure: an error as clients are told of it.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        read: Read,
        failure: Callable[[Exception], HTTPError],
    ) -> None:
        self._engine = engine
        self._read = read
        self._failure = failure

    def routes(self) -> list[Route]:
        """Path, method, handler, and whether the API key guards it."""
        return [
            ("/v1/cache/stats", "GET", self.stats, True),
            ("/v1/cache/explain", "POST", self.explain, True),
            ("/v1/cache/flush", "POST", self.flush, True),
            ("/v1/cache/dump", "GET", self.dump, True),
            ("/v1/cache/snapshot", "GET", self.snapshot, True),
            ("/v1/cache/events", "GET", self.events, True),
        ]

    async def stats(self, request: Request) -> Response:
        """Pages, hit rate, tiers, and where the events stand."""
        events = self._engine.description.get("cache_events")
        public = None if events is None else events["public"]
        return json_response({**await self._engine.cache.stats(), "published": public})

    async def explain(self, request: Request) -> Response:
        """The longest cached prefix of a prompt, and why the page after it is not found."""
        wish = await self._read(request, lambda body: parsed(body, ExplainRequest))
        return json_response(await self._engine.cache.explain(wish.prompt, salt=wish.cache_salt, adapter=wish.adapter))

    async def flush(self, request: Request) -> Response:
        """Forget all cached content."""
        wish = await self._read(request, lambda body: parsed(body or b"{}", FlushRequest))
        return json_response(await self._engine.cache.flush(tiers=wish.tiers))

    async def dump(self, request: Request) -> Response:
        """The keys of the pool, from the cache itself, as of an event's number."""
        return json_response(await self._engine.cache.dump())

    async def snapshot(self, request: Request) -> Response:
        """All that can be found, by the events."""
        return json_response(plain(await self._engine.cache.snapshot()))

    async def events(self, request: Request) -> Response:
        """Batches of events as they come, from number ``from`` of ``epoch`` on; by default from now on.

        410 where these events are not kept any more: then take a snapshot and go on from its number.
        """
        epoch, sequence = request.query_params.get("epoch") or None, place_in(request.query_params.get("from"))
        reader = self._engine.cache.reader()
        try:
            if sequence is None:
                stats = await self._engine.cache.stats()
                epoch, sequence = stats["epoch"], stats["sequence"]
            first = await reader.replay(epoch, sequence)
        except TooOld as error:
            reader.close()
            raise gone(error) from error
        except BaseException:
            reader.close()
            raise
        headers = {"x-cache-epoch": first.epoch}
        return EventStream(self._stream(reader, first), reader.close, headers=headers)

    async def _stream(self, reader: CacheReader, first: CacheBatch) -> AsyncIterator[dict[str, Any] | str]:
        """The stream's events. An error in the middle is its last one."""
        try:
            async with contextlib.aclosing(reader.follow(first)) as batches:
                async for batch in batches:
                    yield plain(batch)
        except TooOld as error:
            yield gone(error).body()
        except Exception as error:
            yield self._failure(error).body()


def gone(error: TooOld) -> HTTPError:
    """These events are not kept any more."""
    return HTTPError(410, str(error), code="too_old", param="from")


def place_in(text: str | None) -> int | None:
    """The number that ``from`` says. Raises ``InvalidRequest``."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 19 or int(text) >= MAX_SEQUENCE:
        raise InvalidRequest("from", f"is {text[:40]!r}, must be the number of an event")
    return int(text)


def parsed(body: bytes, kind: type[Any]) -> Any:
    """A body as the struct that it should be. Raises ``InvalidRequest``."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequest("body", str(error)) from error
