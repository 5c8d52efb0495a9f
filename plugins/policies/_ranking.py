"""Ranking idle cached content once for several evictions: listing it costs time in proportion to its size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from engine.core.plan import Candidate, EvictionPool

BATCH = 64  # most candidates kept from one ranking for the evictions to come
SHARE = 8  # and at most one in so many: what is ranked long ago is ranked wrongly


def pages_of(key: object) -> Sequence[int]:
    """The pages behind a candidate's key: the key itself (caches of pages) or its ``pages`` (nodes of a tree)."""
    if isinstance(key, int):
        return (key,)
    pages = getattr(key, "pages", ())
    return pages if isinstance(pages, list | tuple) else ()


class Ranking:
    """Hands out the best candidates of a ranking, and ranks anew when they are used up.

    Keys that are in use by then are skipped by whoever drops them, and the default fills what is missing.
    """

    def __init__(self) -> None:
        self._ranked: deque[Candidate] = deque()

    def take(
        self, need: int, pool: EvictionPool, rank: Callable[[Sequence[Candidate]], Sequence[Candidate]]
    ) -> list[object]:
        """Keys of at least ``need`` pages, if there are so many. Mutates."""
        keys: list[object] = []
        fresh = False
        while need > 0:
            if not self._ranked:
                if fresh:
                    break
                candidates = pool.candidates()
                self._ranked.extend(rank(candidates)[: max(need, min(BATCH, len(candidates) // SHARE))])
                fresh = True
                continue
            candidate = self._ranked.popleft()
            keys.append(candidate.key)
            need -= max(1, candidate.pages)
        return keys

    def forget(self) -> None:
        """What was ranked is no longer true. Mutates."""
        self._ranked.clear()
