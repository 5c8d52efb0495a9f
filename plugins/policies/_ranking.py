"""Ranking idle cached content once for several evictions: listing it costs time in proportion to its size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from engine.core.plan import Candidate, EvictionPool

BATCH = 64  # most candidates kept from one ranking for the evictions to come
SPARES = 16  # named beyond what is needed, in case that some are in use by now
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
        """Keys of at least ``need`` pages, if there are so many, and a few to spare. Mutates."""
        taken = self._pop(need)
        if len(self._ranked) < SPARES:  # what is left of an old ranking may all be in use by now
            candidates = pool.candidates()
            self._ranked = deque(rank(candidates)[: max(need, SPARES, min(BATCH, len(candidates) // SHARE))])
            taken |= self._pop(need)
        taken |= dict.fromkeys(candidate.key for candidate in islice(self._ranked, SPARES))
        return list(taken)

    def _pop(self, need: int) -> dict[object, None]:
        taken: dict[object, None] = {}
        while need > 0 and self._ranked:
            candidate = self._ranked.popleft()
            taken[candidate.key] = None
            need -= max(1, candidate.pages)
        return taken

    def forget(self) -> None:
        """What was ranked is no longer true. Mutates."""
        self._ranked.clear()
