"""Is what a server tells of its cache true? Follow its events, then compare the index with a dump of the cache."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any

from engine.cli._http import HTTPRefused, Server
from engine.core.cache_events import CacheBatch, CacheSnapshot, from_plain
from engine.core.cache_index import CacheIndex
from engine.core.cache_subscriber import CacheSubscriber
from engine.core.errors import EngineError

TRIES = 3  # an epoch may end between the last event and the dump
STRAGGLERS = 30.0  # seconds that events before a dump may take to arrive


class Follower(ABC):
    """Keeps an index by one of the two ways to the events."""

    index: CacheIndex
    events = replays = snapshots = 0

    @abstractmethod
    def advance(self, upto: int | None = None) -> None:
        """Take in what comes within a second or two, nothing from event ``upto`` on. Raises ``EngineError``."""

    @abstractmethod
    def close(self) -> None:
        """Leave. Idempotent."""


class OverHTTP(Follower):
    """Server-sent events. The server closes gaps by itself; what is too old is answered with an error."""

    def __init__(self, server: Server) -> None:
        self.index = CacheIndex()
        self._server = server
        self._stream: Generator[Any, None, None] | None = None
        self._rest: CacheBatch | None = None

    def advance(self, upto: int | None = None) -> None:
        """One batch."""
        try:
            if self._stream is None:
                self._start_anew()
            batch = self._rest or self._next()
        except HTTPRefused as error:
            if error.code != "too_old":
                raise
            self.close()
            return
        before = self.index.sequence
        need = self.index.apply(batch, upto)
        if need != "nothing":
            raise EngineError(f"the server left events out: {before} is the next, and it sent {batch.sequence}")
        self.events += self.index.sequence - before
        self._rest = batch if self.index.sequence < batch.end else None

    def close(self) -> None:
        """End the stream."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _start_anew(self) -> None:
        snapshot = from_plain(self._server.ask("/v1/cache/snapshot"))
        assert isinstance(snapshot, CacheSnapshot)
        self.index.load(snapshot)
        self.snapshots += 1
        self._rest = None
        self._stream = self._server.events(f"/v1/cache/events?epoch={snapshot.epoch}&from={snapshot.sequence}")

    def _next(self) -> CacheBatch:
        assert self._stream is not None
        event = next(self._stream, None)
        if event is None:
            raise EngineError("the server ended the stream")
        batch = from_plain(event)
        assert isinstance(batch, CacheBatch)
        return batch


class OverZMQ(Follower):
    """The published endpoints."""

    def __init__(self, events: str, replay: str, topic: str) -> None:
        self._subscriber = CacheSubscriber(events, replay, topic=topic)
        self.index = self._subscriber.index

    def advance(self, upto: int | None = None) -> None:
        """One message."""
        before = self.index.epoch, self.index.sequence
        self._subscriber.poll(2.0, upto)
        if before[0] == self.index.epoch:
            self.events += self.index.sequence - before[1]
        self.replays, self.snapshots = self._subscriber.replays, self._subscriber.snapshots

    def close(self) -> None:
        """Free the sockets."""
        self._subscriber.close()


def compare(server: Server, seconds: float, *, over_zmq: bool = False) -> dict[str, Any]:
    """Follow for so long, then compare with a dump. Returns what was found; ``equal`` is the verdict.

    Raises:
        EngineError: there is no server, no events, or nothing to compare with.
    """
    follower = _follower(server, over_zmq)
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until or follower.index.epoch is None:
            follower.advance()
        for _ in range(TRIES):
            dump = server.ask("/v1/cache/dump")
            late = time.monotonic() + STRAGGLERS
            while (follower.index.epoch, follower.index.sequence) != (dump["epoch"], dump["sequence"]):
                if time.monotonic() > late or _beyond(follower.index, dump):
                    break
                follower.advance(dump["sequence"])
            else:
                return _verdict(follower, dump)
        raise EngineError("the cache's epoch changes faster than it can be compared: try again")
    finally:
        follower.close()


def _beyond(index: CacheIndex, dump: dict[str, Any]) -> bool:
    return index.epoch == dump["epoch"] and index.sequence > int(dump["sequence"])


def _follower(server: Server, over_zmq: bool) -> Follower:
    if not over_zmq:
        return OverHTTP(server)
    published = server.ask("/v1/cache/stats")["published"]
    if published is None or published["events"] is None:
        raise EngineError("the server publishes no events over ZMQ: start it with --cache-events tcp://HOST:PORT")
    events, replay = (reachable(published[name], server.host) for name in ("events", "replay"))
    return OverZMQ(events, replay, published["topic"])


def reachable(endpoint: str, host: str) -> str:
    """Where to connect for an endpoint that listens on all addresses of a host."""
    for everywhere in ("//*:", "//0.0.0.0:", "//[::]:"):
        endpoint = endpoint.replace(everywhere, f"//{host}:")
    return endpoint


def _verdict(follower: Follower, dump: dict[str, Any]) -> dict[str, Any]:
    index = follower.index
    told, cached = {key.hex() for key in index.pages(dump["tier"])}, set(dump["keys"])
    return {
        "equal": told == cached,
        "pages": len(cached),
        "missing": sorted(cached - told),
        "extra": sorted(told - cached),
        "epoch": index.epoch,
        "sequence": index.sequence,
        "events": follower.events,
        "snapshots": follower.snapshots,
        "replays": follower.replays,
    }
