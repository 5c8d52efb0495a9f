"""Cache events: what becomes matchable and what ceases to be, in order, for whoever keeps an index of the cache.

An *epoch* is one life of the pool's content: it ends with a flush, with other weights and with the process. Within it
events are numbered from 0 without a gap. ``CacheLog`` numbers them, keeps the last ones for replay, and knows the live
set for snapshots. It is the one place where the engine's thread, stores' threads and readers meet: every method may be
called from any thread and returns at once.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.core.errors import EngineError

POOL = "pool"  # the tier of the engine's own KV memory
HISTORY = 65_536  # events kept for replay, unless configured
BATCH = 4096  # most events of one answer or message


class CacheEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change. Its epoch and number are those of the batch that carries it.

    Args:
        kind: ``stored``: the page can be found from now on; ``removed``: it cannot any more; ``cleared``: nothing of
            the tier can (the first event of every epoch).
        tier: ``pool``, or the name of the connector that keeps the page.
        key: the chain digest of ``core.identity.page_digests``, 32 bytes: model, adapter, salt, and all tokens up to
            the page's end. Empty for ``cleared``.
        parent: the key of the page before it; ``None`` for the first page of a prompt, and where a tier does not say.
        tokens, salt, adapter: what the key digests; only where the engine was told to say it.
    """

    kind: Literal["stored", "removed", "cleared"]
    tier: str
    key: bytes = b""
    parent: bytes | None = None
    tokens: list[int] | UnsetType = UNSET
    salt: str | UnsetType = UNSET
    adapter: str | UnsetType = UNSET


class CacheBatch(msgspec.Struct, frozen=True):
    """Events in order. Event i has number ``sequence + i``; without events it says where the log stands.

    ``page_size`` is the number of tokens a page.
    """

    epoch: str
    sequence: int
    page_size: int
    events: list[CacheEvent]

    @property
    def end(self) -> int:
        """The number of the event that comes after it."""
        return self.sequence + len(self.events)


class CacheSnapshot(msgspec.Struct, frozen=True):
    """All that could be found before event ``sequence``, as ``stored`` events, every parent before its children."""

    epoch: str
    sequence: int
    page_size: int
    entries: list[CacheEvent]


class TooOld(EngineError):
    """These events are not kept any more, or are of another epoch: take a snapshot."""


class CacheLog:
    """Numbers events and remembers them.

    Args:
        page_size: tokens a page.
        history: events kept for replay.
        with_tokens: events tell token ids, salt and adapter.

    Attribute ``news``: called after each change, from the thread that made it; must not block.
    """

    def __init__(self, page_size: int, *, history: int = HISTORY, with_tokens: bool = False) -> None:
        self.page_size = page_size
        self.with_tokens = with_tokens
        self.news: Callable[[], None] = nobody
        self._history = history
        self._lock = threading.Lock()
        self._live: dict[str, dict[bytes, CacheEvent]] = {POOL: {}}
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.epoch = secrets.token_hex(8)
        self._kept: list[CacheEvent] = [CacheEvent("cleared", POOL)]
        self._first = 0  # the number of the first that is kept

    @property
    def place(self) -> tuple[str, int]:
        """The epoch, and the number that its next event will have."""
        with self._lock:
            return self.epoch, self._first + len(self._kept)

    @property
    def oldest(self) -> tuple[str, int]:
        """The epoch, and the number of its first event that is kept."""
        with self._lock:
            return self.epoch, self._first

    def count(self) -> dict[str, int]:
        """Pages by tier that can be found now."""
        with self._lock:
            return {tier: len(entries) for tier, entries in self._live.items()}

    def has(self, tier: str, key: bytes) -> bool:
        """Whether the page can be found in the tier."""
        return key in self._live.get(tier, ())

    def tiers_with(self, key: bytes) -> list[str]:
        """Tiers beyond the pool in which the page can be found."""
        with self._lock:
            return [tier for tier, entries in self._live.items() if tier != POOL and key in entries]

    def append(self, events: Sequence[CacheEvent]) -> None:
        """Changes of the pool, in order. Mutates."""
        with self._lock:
            pool = self._live[POOL]
            for event in events:
                if event.kind == "stored":
                    pool[event.key] = event
                else:
                    del pool[event.key]
            self._keep(events)
        self.news()

    def notice(self, tier: str, kind: Literal["stored", "removed"], keys: Iterable[bytes]) -> None:
        """A tier keeps these from now on, or no longer. What is known already is no event. Mutates."""
        with self._lock:
            entries = self._live.setdefault(tier, {})
            events = []
            for key in dict.fromkeys(keys):
                if (key in entries) == (kind == "stored"):
                    continue
                event = CacheEvent(kind, tier, key)
                if kind == "stored":
                    entries[key] = event
                else:
                    del entries[key]
                events.append(event)
            self._keep(events)
        if events:
            self.news()

    def clear(self) -> None:
        """Nothing of the pool can be found any more: another epoch begins. Tiers keep what they have. Mutates."""
        with self._lock:
            self._live[POOL] = {}
            self._begin_epoch()
        self.news()

    def replay(self, epoch: str | None, sequence: int, most: int = BATCH) -> CacheBatch:
        """Events from number ``sequence`` on, at most so many; none where there is nothing newer.

        Args:
            epoch: that of the number; ``None``: the present one.

        Raises:
            TooOld: they are not kept, are of another epoch, or have not happened.
        """
        with self._lock:
            end = self._first + len(self._kept)
            if epoch is not None and epoch != self.epoch:
                raise TooOld(f"epoch {epoch} is over, this is {self.epoch}: take a snapshot")
            if sequence < self._first:
                raise TooOld(f"events before {self._first} are not kept any more: take a snapshot")
            if sequence > end:
                raise TooOld(f"event {sequence} is yet to come, {end} is the next: take a snapshot")
            at = sequence - self._first
            return CacheBatch(self.epoch, sequence, self.page_size, self._kept[at : at + most])

    def snapshot(self) -> CacheSnapshot:
        """All that can be found now."""
        with self._lock:
            epoch, end = self.epoch, self._first + len(self._kept)
            live = [dict(entries) for entries in self._live.values()]
        entries = [event for tier in live for event in parents_first(tier)]
        return CacheSnapshot(epoch, end, self.page_size, entries)

    def _keep(self, events: Sequence[CacheEvent]) -> None:
        self._kept += events
        if len(self._kept) >= 2 * self._history:
            spare = len(self._kept) - self._history
            del self._kept[:spare]
            self._first += spare


def parents_first(entries: dict[bytes, CacheEvent]) -> Iterator[CacheEvent]:
    """The entries, each after its parent if that is one of them. Empties the dictionary."""
    while entries:
        chain = []
        key: bytes | None = next(iter(entries))
        while key is not None and key in entries:
            event = entries.pop(key)
            chain.append(event)
            key = event.parent
        yield from reversed(chain)


def plain(value: CacheBatch | CacheSnapshot) -> dict[str, Any]:
    """As JSON has it: keys in hex."""
    found: dict[str, Any] = msgspec.to_builtins(value, builtin_types=(bytes,))
    for event in found["events" if "events" in found else "entries"]:
        event["key"] = event.get("key", b"").hex()
        parent = event.get("parent")
        event["parent"] = None if parent is None else parent.hex()
    return found


def from_plain(value: dict[str, Any]) -> CacheBatch | CacheSnapshot:
    """What ``plain`` was given. Raises ``msgspec.ValidationError`` for anything else."""
    many = "events" if "events" in value else "entries"
    events = [
        {
            **event,
            "key": bytes.fromhex(event["key"]),
            "parent": None if event["parent"] is None else bytes.fromhex(event["parent"]),
        }
        for event in value[many]
    ]
    kind: Any = CacheBatch if many == "events" else CacheSnapshot
    found: CacheBatch | CacheSnapshot = msgspec.convert({**value, many: events}, kind, builtin_types=(bytes,))
    return found


def nobody() -> None:
    """Nobody listens."""
