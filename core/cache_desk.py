"""What can be asked of an engine core about its cache, between two steps: numbers, reasons, a dump; and a flush."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.core.cache_events import CacheEvent, CacheLog, CacheSnapshot
from engine.core.cache_explain import explain
from engine.core.cache_watch import CacheWatch
from engine.core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from engine.core.cache_feed import CacheFeed
    from engine.core.loop import EngineCore

log = logging.getLogger(__name__)

OFF = "cache events are off: start the engine with --cache-events on"


class CacheDesk:
    """The cache of one core, as it is asked from outside. The engine's thread only, between steps.

    Args:
        log: where cache events go; ``None``: there are none, and nothing is told by anybody.
        feed: who publishes them; closed with the desk.

    Attributes:
        log: as given.
        watch: who makes the events; ``None`` where there are none, or the KV cache does not tell.
    """

    def __init__(self, core: EngineCore, log: CacheLog | None = None, feed: CacheFeed | None = None) -> None:
        self._core = core
        self.log = log if feed is None else feed.log
        self._feed = feed
        self.watch: CacheWatch | None = None

    def open(self) -> None:
        """The plugins have started, connectors are not registered yet: listen to them. Mutates."""
        core, log = self._core, self.log
        if log is None:
            return
        watch = CacheWatch(log, core)
        if core.kv.watch(watch):
            self.watch = watch
        for connector in core.exchange.connectors:
            connector.notice = partial(log.notice, core.hooks.name(connector))
        told = "every page" if self.watch else f"nothing: kvcache {core.kv.name!r} does not tell"
        about: dict[str, Any] = {"pool": told, "tokens": log.with_tokens}
        if self._feed is not None:
            about |= {"private": self._feed.endpoints, "public": self._feed.public}
            self._feed.start()
        core.describe_also(cache_events=about)

    def settle(self) -> None:
        """Steps have landed. Mutates."""
        if self.watch is not None:
            self.watch.settle()

    def renamed(self, fingerprint: str) -> None:
        """The model had this fingerprint. Mutates."""
        if self.watch is not None:
            self.watch.renamed(fingerprint)

    def check(self) -> None:
        """Raise ``InvariantViolation`` where what was told is not what is cached. Does not mutate."""
        if self.watch is not None and (contents := self._core.kv.contents()) is not None:
            self.watch.check(contents)

    def close(self) -> None:
        """End the feed. Idempotent."""
        if self._feed is not None:
            self._feed.close()

    # ---- what is asked

    @property
    def place(self) -> tuple[str, int] | tuple[None, None]:
        """The epoch, and the number of its next event; both ``None`` where there are no events."""
        return (None, None) if self.log is None else self.log.place

    def ask(self, what: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """``stats``, ``explain``, ``flush`` or ``dump`` by name, the answer as plain values: for other processes."""
        known: dict[str, Callable[..., dict[str, Any]]] = {
            "stats": self.stats,
            "explain": self.explain,
            "flush": self.flush,
            "dump": self.dump,
        }
        if what not in known:
            raise EngineError(f"{what!r} cannot be asked of a cache: {', '.join(known)} can")
        return known[what](**options)

    def stats(self) -> dict[str, Any]:
        """Pages, hit rate, tiers, and where the events stand. Does not mutate."""
        core = self._core
        numbers, counters = core.kv.numbers(), core.counters
        asked = counters.looked_up_tokens
        counts = self.log.count() if self.log is not None else {}
        epoch, sequence = self.place
        tiers = {
            name: {**connector.stats(), **({"pages_told": counts[name]} if name in counts else {})}
            for connector in core.exchange.connectors
            for name in (core.hooks.name(connector),)
        }
        return {
            "kvcache": core.kv.name,
            "caching": core.kv.caching,
            "page_size": numbers.page_size,
            "pages": {
                "total": numbers.total,
                "free": numbers.free,
                "evictable": numbers.evictable,
                "pinned": numbers.pinned,
                "fenced": core.pool.num_fenced,
            },
            "looked_up_tokens": asked,
            "cached_tokens": counters.cached_tokens,
            "loaded_tokens": counters.loaded_tokens,
            "hit_rate": counters.cached_tokens / asked if asked else None,
            "evicted_pages": counters.evicted_pages,
            "tiers": tiers,
            "weights_epoch": core.weights_epoch,
            "epoch": epoch,
            "sequence": sequence,
            "cached_pages": counts.get("pool") if self.watch is not None else None,
        }

    def explain(self, tokens: Sequence[int], *, salt: str = "", adapter: str = "") -> dict[str, Any]:
        """The longest cached prefix of a prompt, and why the page after it is not found.

        Does not mutate, not even recency, but that what is there for a time goes when it is over.
        ``missing.why`` is one of ``core.cache_explain.WORDS``.

        Raises:
            InvalidRequest: no prompt could be so.
            ConfigError: this KV cache cannot say.
        """
        self._core.keep_time()
        return explain(self._core, tokens, salt=salt, adapter=adapter)

    def flush(self, *, tiers: bool = False) -> dict[str, Any]:
        """Forget all content: what is idle at once, what is in use when its users let go. Another epoch begins.

        Args:
            tiers: also what connectors keep, those that can forget. Mutates.
        """
        core = self._core
        before = core.kv.numbers()
        core.record.tell.flushed()
        core.kv.reset()
        after = core.kv.numbers()
        said: dict[str, Any] = {}
        for connector in core.exchange.connectors if tiers else ():
            name = core.hooks.name(connector)
            try:
                said[name] = connector.clear()
            except ConfigError as error:
                said[name] = str(error)
            except Exception as error:  # of a disk, or a plugin: the engine and the other tiers go on
                log.exception("connector %s could not forget its pages", name)
                said[name] = f"{type(error).__name__}: {error}"
        freed = after.free - before.free
        return {"freed_pages": freed, "in_use": after.pinned, "tiers": said, "epoch": self.place[0]}

    def dump(self) -> dict[str, Any]:
        """The keys of the pool, from the cache itself, as of an event's number: to compare an index with.

        Raises:
            ConfigError: there are no events, or this cache cannot list what it has.
        """
        contents = self._core.kv.contents()
        if self.log is None:
            raise ConfigError(OFF)
        if contents is None or self.watch is None:
            raise ConfigError(f"kvcache {self._core.kv.name!r} cannot list what it has")
        epoch, sequence = self.log.place
        keys = sorted(key.hex() for key in self.watch.committed(contents))
        return {"epoch": epoch, "sequence": sequence, "tier": "pool", "keys": keys}

    def snapshot(self) -> CacheSnapshot:
        """What can be found, by the events. Raises ``ConfigError`` where there are none."""
        return self._log().snapshot()

    def events(self, epoch: str, sequence: int) -> list[CacheEvent]:
        """Events from a number on. Raises ``TooOld``, and ``ConfigError`` where there are none."""
        return self._log().replay(epoch, sequence).events

    def _log(self) -> CacheLog:
        if self.log is None:
            raise ConfigError(OFF)
        return self.log
