"""The page pool: who owns each page of KV memory. Every page has exactly one state and is released exactly once.

free ── take ──▶ held (by the KV cache: a request's page, or cached content) ── give ──▶ free
                              │ a transfer fences it
                              ▼
                 fenced: given up, but a transfer still reads or writes it ── unfence ──▶ free
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NoReturn

from engine.core.errors import InvariantViolation, OutOfPages


class PagePool:
    """Hands out page numbers ``0 … num_pages-1``. The KV cache is its only client; the core audits both.

    Args:
        num_pages: pages in the pool.
        page_size: tokens a page holds.
    """

    __slots__ = ("_fences", "_free", "_held", "_limbo", "num_pages", "page_size")

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: deque[int] = deque(range(num_pages))
        self._held: set[int] = set()
        self._fences: dict[int, int] = {}  # page -> transfers that touch it
        self._limbo: set[int] = set()  # given up while fenced

    @property
    def num_free(self) -> int:
        """Pages that ``take`` can hand out now."""
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        """Pages given up by their owner that a transfer still touches."""
        return len(self._limbo)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_pages * self.page_size

    @property
    def held(self) -> frozenset[int]:
        """A copy of the set of pages in the KV cache's hands."""
        return frozenset(self._held)

    def held_of(self, pages: Iterable[int]) -> list[int]:
        """Those of these pages that are in the KV cache's hands."""
        held = self._held
        return [page for page in pages if page in held]

    def take(self, count: int) -> list[int]:
        """Take ``count`` pages off the front of the free queue. Mutates. Raises ``OutOfPages``, taking none."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free of {self.num_pages}")
        popleft = self._free.popleft
        pages = [popleft() for _ in range(count)]
        self._held.update(pages)
        return pages

    def give(self, pages: Sequence[int], *, front: bool = False) -> None:
        """Give pages back, each held and given once. Mutates. ``front`` keeps their order at the queue's front.

        Raises:
            InvariantViolation: a page is not held (a double release, or a page never taken); nothing is changed.
        """
        held = self._held
        before = len(held)
        held.difference_update(pages)
        if before - len(held) != len(pages):
            self._refuse(pages)
        if self._fences:
            self._limbo.update(page for page in pages if page in self._fences)
            pages = [page for page in pages if page not in self._limbo]
        if front:
            self._free.extendleft(reversed(pages))
        else:
            self._free.extend(pages)

    def _refuse(self, pages: Sequence[int]) -> NoReturn:
        """Some of these pages were not held, or stand there twice. Those that were held are held again."""
        elsewhere = self._limbo.union(self._free)
        was_held = {page for page in pages if 0 <= page < self.num_pages and page not in elsewhere}
        self._held |= was_held
        wrong = sorted(set(pages) - was_held) or sorted(page for page, times in Counter(pages).items() if times > 1)
        raise InvariantViolation(f"pages released twice or never taken: {wrong[:8]}")

    def fence(self, pages: Iterable[int]) -> None:
        """A transfer touches these pages: they are not reused before ``unfence``, whoever lets go of them. Mutates."""
        for page in pages:
            self._fences[page] = self._fences.get(page, 0) + 1

    def unfence(self, pages: Iterable[int]) -> None:
        """The transfer is over; pages that nobody holds any more become free. Mutates."""
        for page in pages:
            left = self._fences[page] - 1
            if left:
                self._fences[page] = left
                continue
            del self._fences[page]
            if page in self._limbo:
                self._limbo.discard(page)
                self._free.append(page)

    def check(self) -> None:
        """Audit: free, held and fenced pages are disjoint and are all the pages there are. Does not mutate."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantViolation("a page stands twice in the free queue")
        if free & self._held or free & self._limbo or self._held & self._limbo:
            raise InvariantViolation("a page has two states at once")
        if len(free) + len(self._held) + len(self._limbo) != self.num_pages:
            raise InvariantViolation(
                f"{len(free)} free + {len(self._held)} held + {len(self._limbo)} fenced is not {self.num_pages} pages"
            )
