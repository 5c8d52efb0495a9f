"""What a KV cache tells of its content, and how the core makes cache events of it.

Caches tell of *pages*, at once: also of pages whose step is still to be computed. The watch keeps those back until the
step has landed (nothing outside the process sees a page before its commit; what is taken back before was never told),
and turns copies of equal content into one event: stored with the first copy, removed with the last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.core.cache_events import POOL, CacheEvent, CacheLog
from engine.core.errors import InvariantViolation
from engine.core.request import Request

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

REMEMBERED = 65_536  # keys that are gone, kept to explain why something is not found
NAMES = 1024  # pairs of adapter and salt, kept for the same


class CacheWatcher(Protocol):
    """Whom ``KVCache.watch`` is given. Called on the engine's thread, in the order in which things happen."""

    def stored(
        self, request: Request, first: int, pages: Sequence[int], keys: Sequence[bytes], parent: bytes | None
    ) -> None:
        """The request's pages from number ``first`` on can be matched now, each by its chain digest.

        Args:
            pages, keys: of equal length. A page that was told of is not told of again before it was removed.
            parent: the key of page ``first - 1``; ``None`` for page 0.
        """

    def removed(self, pages: Iterable[int]) -> None:
        """These pages, all told of before, cannot be matched any more: evicted, or taken back."""

    def cleared(self) -> None:
        """No page can be matched any more."""


class CacheWatch:
    """Makes events of what a cache tells.

    Args:
        log: where they go.
        core: whose steps decide when a page is committed.

    Attributes:
        pages: the key of each committed page.
        gone: why keys cannot be found any more, of the last ones: ``evicted`` or ``flushed``.
        names: pairs of adapter and salt under which content was stored lately.
        fingerprints: of the weights before these.
    """

    def __init__(self, log: CacheLog, core: EngineCore) -> None:
        self._log, self._core = log, core
        self._early = core.kv.publish_when == "planned"
        self._size = core.limits.page_size
        self.pages: dict[int, bytes] = {}
        self._copies: dict[bytes, int] = {}  # committed pages with this key
        self._planned: dict[int, tuple[int, CacheEvent]] = {}  # page -> the step that computes it; oldest first
        self.gone: OrderedDict[bytes, str] = OrderedDict()
        self.names: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.fingerprints: list[str] = []

    # ---- told by the cache

    def stored(
        self, request: Request, first: int, pages: Sequence[int], keys: Sequence[bytes], parent: bytes | None
    ) -> None:
        """See ``CacheWatcher``."""
        self._remember_name(request)
        events = []
        for at, (page, key) in enumerate(zip(pages, keys, strict=True)):
            event = self._event(request, first + at, key, parent)
            parent = key
            if self._early:
                self._planned[page] = self._core.counters.steps, event
            elif self._commit(page, event):
                events.append(event)
        if events:
            self._log.append(events)

    def removed(self, pages: Iterable[int]) -> None:
        """See ``CacheWatcher``."""
        events = []
        for page in pages:
            if self._planned.pop(page, None) is not None:
                continue
            key = self.pages.pop(page)
            left = self._copies[key] - 1
            if left:
                self._copies[key] = left
                continue
            del self._copies[key]
            self._forget(key, "evicted")
            events.append(CacheEvent("removed", POOL, key))
        if events:
            self._log.append(events)

    def cleared(self) -> None:
        """See ``CacheWatcher``."""
        for key in self._copies:
            self._forget(key, "flushed")
        self.pages.clear()
        self._copies.clear()
        self._planned.clear()
        self._log.clear()

    # ---- told by the core

    def settle(self) -> None:
        """Steps have landed: tell of the pages that they computed. Mutates."""
        oldest = self._core.flight.oldest
        landed = self._core.counters.steps if oldest is None else oldest.index - 1
        events = []
        while self._planned:
            page = next(iter(self._planned))
            step, event = self._planned[page]
            if step > landed:
                break
            del self._planned[page]
            if self._commit(page, event):
                events.append(event)
        if events:
            self._log.append(events)

    def renamed(self, fingerprint: str) -> None:
        """The model had this fingerprint and has another one now. Mutates."""
        self.fingerprints = [*self.fingerprints[-15:], fingerprint]

    # ---- to look at

    def is_planned(self, key: bytes) -> bool:
        """Whether a step in flight computes the page."""
        return any(event.key == key for _, event in self._planned.values())

    def committed(self, contents: dict[int, bytes]) -> set[bytes]:
        """Of a cache's contents, the keys that have been told of. Does not mutate."""
        return {key for page, key in contents.items() if page in self.pages}

    def check(self, contents: dict[int, bytes]) -> None:
        """Raise ``InvariantViolation`` where what was told is not what the cache has. Does not mutate."""
        told = {**self.pages, **{page: event.key for page, (_, event) in self._planned.items()}}
        if told != contents:
            wrong = {page: (told.get(page), contents.get(page)) for page in told.keys() | contents.keys()}
            wrong = {page: both for page, both in wrong.items() if both[0] != both[1]}
            raise InvariantViolation(f"cache events: pages told and pages there differ: {wrong}")
        live = {entry.key for entry in self._log.snapshot().entries if entry.tier == POOL}
        if live != set(self._copies) or live != set(self.pages.values()):
            raise InvariantViolation("cache events: the log's live set is not that of the committed pages")

    # ---- inside

    def _event(self, request: Request, number: int, key: bytes, parent: bytes | None) -> CacheEvent:
        if not self._log.with_tokens:
            return CacheEvent("stored", POOL, key, parent)
        start = number * self._size
        tokens = request.tokens[start : start + self._size]
        return CacheEvent("stored", POOL, key, parent, tokens, request.salt, request.adapter)

    def _commit(self, page: int, event: CacheEvent) -> bool:
        """The page is there; True where it is the first with its key. Mutates."""
        self.pages[page] = event.key
        copies = self._copies.get(event.key, 0)
        self._copies[event.key] = copies + 1
        if copies:
            return False
        self.gone.pop(event.key, None)
        return True

    def _forget(self, key: bytes, why: str) -> None:
        self.gone[key] = why
        self.gone.move_to_end(key)
        if len(self.gone) > REMEMBERED:
            self.gone.popitem(last=False)

    def _remember_name(self, request: Request) -> None:
        name = request.adapter, request.salt
        self.names[name] = None
        self.names.move_to_end(name)
        if len(self.names) > NAMES:
            self.names.popitem(last=False)
