"""Until when pages are found: of those alone that a request with a ``cache_ttl`` wrote, so that nobody else pays."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from engine.core.request import Request

SLACK = 64


class Times:
    """Times of pages, in seconds on the engine's clock. True while any page has one."""

    def __init__(self) -> None:
        self._now = 0.0
        self._until: dict[int, float] = {}
        self._due: list[tuple[float, int]] = []  # a heap; entries that ``_until`` does not have any more are stale

    def __len__(self) -> int:
        return len(self._until)

    def pages(self) -> set[int]:
        """Pages that have a time."""
        return set(self._until)

    def wrote(self, pages: Iterable[int], ttl: float) -> float:
        """A request wrote these pages; returns until when they are found. Mutates."""
        until = self._now + ttl
        for page in pages:
            self._set(page, until)
        return until

    def used(self, pages: Iterable[int], request: Request) -> None:
        """A request adopted these pages: they live for its time, or without end; one that writes nothing leaves no
        trace. Mutates."""
        if not request.write_cache:
            return
        if request.cache_ttl is None:
            self.forget(pages)
        else:
            self.prolong(pages, self._now + request.cache_ttl)

    def forget(self, pages: Iterable[int]) -> None:
        """These pages have no time any more. Mutates."""
        for page in pages:
            self._until.pop(page, None)

    def over(self, now: float) -> list[int]:
        """Pages whose time is over, which have none from here on. It is ``now``. Mutates."""
        self._now = now
        found: list[int] = []
        while self._due and self._due[0][0] <= now:
            until, page = heapq.heappop(self._due)
            if self._until.get(page) == until:
                del self._until[page]
                found.append(page)
        return found

    def prolong(self, pages: Iterable[int], until: float) -> None:
        """Those of these pages that have a time live until then at least. Mutates."""
        for page in pages:
            if self._until.get(page, until) < until:
                self._set(page, until)

    def _set(self, page: int, until: float) -> None:
        self._until[page] = until
        heapq.heappush(self._due, (until, page))
        if len(self._due) > 2 * len(self._until) + SLACK:
            self._due = [(until, page) for page, until in self._until.items()]
            heapq.heapify(self._due)
