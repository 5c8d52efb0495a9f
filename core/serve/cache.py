"""The cache of an engine that runs elsewhere: what can be asked of it, and its events as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from engine.core.cache_desk import OFF
from engine.core.cache_events import CacheBatch, CacheSnapshot
from engine.core.cache_subscriber import content_of
from engine.core.errors import ConfigError, EngineDead, EngineError
from engine.core.sampling import SamplingParams
from engine.core.validate import validate

if TYPE_CHECKING:
    from engine.core.serve.client import AsyncEngine

ANSWER_SECONDS = 10.0
SILENCE = 5.0  # seconds; the feed speaks every second


class CacheClient:
    """``AsyncEngine.cache``. Questions are answered between two steps; events do not touch the engine's thread."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def stats(self) -> dict[str, Any]:
        """Pages, hit rate, tiers, and where the events stand: ``CacheDesk.stats``."""
        return await self._engine.ask_cache("stats")

    async def explain(self, prompt: str | Sequence[int], *, salt: str = "", adapter: str = "") -> dict[str, Any]:
        """The longest cached prefix of a prompt, and why the page after it is not found: ``CacheDesk.explain``.

        Raises:
            InvalidRequest: no prompt could be so.
        """
        tokens = await self._engine.encode(prompt) if isinstance(prompt, str) else list(prompt)
        validate(tokens, SamplingParams(), self._engine.limits)  # here: a long list would hold up the engine's thread
        return await self._engine.ask_cache("explain", tokens=tokens, salt=salt, adapter=adapter)

    async def flush(self, *, tiers: bool = False) -> dict[str, Any]:
        """Forget all content: ``CacheDesk.flush``."""
        return await self._engine.ask_cache("flush", tiers=tiers)

    async def dump(self) -> dict[str, Any]:
        """The keys of the pool, from the cache itself, as of an event's number: ``CacheDesk.dump``."""
        return await self._engine.ask_cache("dump")

    def reader(self) -> CacheReader:
        """A new reader of the events. Raises ``ConfigError`` where they are off."""
        about = self._engine.description.get("cache_events")
        if about is None:
            raise ConfigError(OFF)
        places = about["private"]
        return CacheReader(self._engine, places["events"], places["replay"])

    async def snapshot(self) -> CacheSnapshot:
        """All that can be found, by the events. Raises ``ConfigError`` where they are off."""
        with self.reader() as reader:
            return await reader.snapshot()


class CacheReader:
    """Reads an engine's events; belongs to one event loop, to be closed."""

    def __init__(self, engine: AsyncEngine, events: str, replay: str) -> None:
        self._engine = engine
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.setsockopt(zmq.SUBSCRIBE, b"")
        self._events.connect(events)
        self._asking = self._context.socket(zmq.DEALER)
        self._asking.connect(replay)

    def __enter__(self) -> CacheReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the sockets. Idempotent."""
        self._context.destroy(linger=0)

    async def snapshot(self) -> CacheSnapshot:
        """All that can be found now."""
        return msgspec.msgpack.decode(await self._ask(b"snapshot"), type=CacheSnapshot)

    async def replay(self, epoch: str | None, sequence: int) -> CacheBatch:
        """Events from a number on, as many as one answer takes. Raises ``TooOld``."""
        answer = await self._ask(b"replay", (epoch or "").encode(), sequence.to_bytes(8, "big"))
        return msgspec.msgpack.decode(answer, type=CacheBatch)

    async def follow(self, first: CacheBatch) -> AsyncGenerator[CacheBatch, None]:
        """Batches in order and without a gap: ``first``, then all that come; now and then one without events.

        Raises:
            TooOld: events were lost, or another epoch has begun: take a snapshot.
            EngineDead: there is no engine any more.
        """
        batch, epoch, at = first, first.epoch, first.sequence
        while True:
            while batch.sequence > at or batch.epoch != epoch:  # some are missing, or it says what is over
                missed = await self.replay(epoch, at)
                if missed.events:
                    yield missed
                    at = missed.end
                else:
                    break
            if batch.epoch == epoch and batch.sequence <= at <= batch.end:
                news = batch.events[at - batch.sequence :]
                yield CacheBatch(epoch, at, batch.page_size, news)
                at = batch.end
            batch = await self._next()

    async def _next(self) -> CacheBatch:
        while not await self._events.poll(int(SILENCE * 1000)):
            health = self._engine.health()
            if not health.ok:
                raise EngineDead(health.cause or "the engine is gone")
        *_, data = await self._events.recv_multipart()
        return msgspec.msgpack.decode(data, type=CacheBatch)

    async def _ask(self, *frames: bytes) -> bytes:
        await self._asking.send_multipart(frames)
        if not await self._asking.poll(int(ANSWER_SECONDS * 1000)):
            raise EngineError(f"the engine's cache events did not answer within {ANSWER_SECONDS:g} s")
        kind, content = await self._asking.recv_multipart()
        return content_of(kind, content)
