"""``paged``: automatic prefix caching by a hash chain of pages. Source: vLLM V1's KV cache manager and block pool.

Who owns a page (refs = requests that use it, key = digest of its content and all before it):

    pool free ──take──▶ refs 1, no key ──publish──▶ refs 1, key ◀──adopt / release──▶ refs n, key
                             │ release                                    │ last release
                             ▼                                            ▼
                         pool free (front)                      idle, key (LRU: back of the line)
                                                                          │ drop / victims
                                                                          ▼
                                                                      pool free

Free pages are handed out before idle ones are evicted, least recently released first. A request lets go of its tail
first, so the heads of prefixes, which more requests share, live longest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from pydantic import Field

from engine.core.errors import InvariantViolation
from engine.core.identity import page_digest
from engine.core.plan import Candidate, KVNumbers
from engine.core.protocols import Context, KVCache, Match, PluginOptions, Publication
from engine.core.request import Request


class _Chain:
    """A request's page digests so far, and how many of its pages are published."""

    __slots__ = ("digests", "published")

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.published = 0


class PagedCache(KVCache):
    """Prefix cache indexed by the chained digest of each full page."""

    name = "paged"
    aliases = ("block-hash", "vllm")
    provides = frozenset({"prefix-cache"})
    publish_when = "planned"

    class Options(PluginOptions):
        enable_prefix_caching: bool = Field(True, description="reuse KV of equal prefixes")
        drop_last_page: bool = Field(False, description="recompute the last page of a hit (EAGLE drafters need it)")

    def start(self, context: Context) -> None:
        self._pool = context.pool
        self._page_size = context.pool.page_size
        self._caching: bool = self.options.enable_prefix_caching
        self._refs: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._pages_of: dict[bytes, list[int]] = {}  # oldest copy first: equal pages computed twice are both kept
        self._idle: dict[int, None] = {}  # insertion order is the order of eviction

    # ---- the protocol

    def match(self, request: Request) -> Match:
        """Whole pages whose digests are known, at most ``num_tokens - 1`` tokens. Mutates nothing."""
        if not self._caching:
            return Match(0, (), 0)
        pages: list[int] = []
        idle = 0
        longest = (request.num_tokens - 1) // self._page_size
        for digest in islice(self._digests(request, longest), longest):
            copies = self._pages_of.get(digest)
            if copies is None:
                break
            pages.append(copies[0])
            idle += copies[0] in self._idle
        if pages and self.options.drop_last_page:
            idle -= pages.pop() in self._idle
        return Match(len(pages) * self._page_size, pages, idle)

    def adopt(self, request: Request, match: Match) -> list[int]:
        """Count the request among the users of the matched pages. Mutates."""
        for page in match.pages:
            self._refs[page] = self._refs.get(page, 0) + 1
            self._idle.pop(page, None)
        self._chain(request).published = len(match.pages)
        return list(match.pages)

    def take(self, request: Request, count: int) -> list[int]:
        """Private pages off the front of the free queue. Mutates."""
        pages = self._pool.take(count)
        for page in pages:
            self._refs[page] = 1
        return pages

    def publish(self, request: Request, upto: int) -> Publication:
        """Give the request's full pages up to ``upto`` tokens their keys. Mutates."""
        full = upto // self._page_size
        if not self._caching:
            return Publication()
        chain = self._chain(request)
        if full <= chain.published:
            return Publication()
        digests = self._digests(request, full)
        keys: list[object] = []
        for number in range(chain.published, full):
            page, digest = request.pages[number], digests[number]
            self._key_of[page] = digest
            self._pages_of.setdefault(digest, []).append(page)
            keys.append((page, digest))
        chain.published = full
        return Publication(keys)

    def unpublish(self, keys: Sequence[object]) -> None:
        """Pages lose the keys that they were published under; idle ones return to the pool. Mutates."""
        for key in keys:
            if not isinstance(key, tuple):
                continue
            page, digest = key
            if self._key_of.get(page) == digest:
                self._forget(page)
                if page in self._idle:
                    del self._idle[page]
                    self._pool.give((page,))

    def release(self, request: Request, keep: int) -> None:
        """One user fewer for each page, tail first. Content keeps its key until the page is reused. Mutates."""
        freed: list[int] = []
        for page in reversed(request.pages):
            left = self._refs[page] - 1
            if left:
                self._refs[page] = left
                continue
            del self._refs[page]
            if page in self._key_of:
                self._idle[page] = None
            else:
                freed.append(page)
        self._chain(request).published = 0
        if freed:
            self._pool.give(freed, front=self._caching)

    def victims(self, need: int) -> Sequence[object]:
        """The idle pages that were released first. Does not mutate."""
        found: list[object] = []
        for page in self._idle:
            if len(found) >= need:
                break
            found.append(page)
        return found

    def candidates(self) -> Sequence[Candidate]:
        """Idle pages, first to go first. Does not mutate."""
        return [Candidate(page, 1, age) for age, page in enumerate(self._idle)]

    def drop(self, keys: Iterable[object], need: int | None = None) -> int:
        """Idle pages by number lose their keys and return to the pool. Mutates."""
        dropped: list[int] = []
        for page in keys:
            if need is not None and len(dropped) >= need:
                break
            if isinstance(page, int) and page in self._idle:
                del self._idle[page]
                self._forget(page)
                dropped.append(page)
        self._pool.give(dropped)
        return len(dropped)

    def numbers(self) -> KVNumbers:
        """Free, idle and used pages. Does not mutate."""
        idle = len(self._idle)
        pool = self._pool
        return KVNumbers(pool.num_pages, pool.num_free, idle, len(self._refs), pool.page_size)

    def reset(self) -> None:
        """Drop everything idle; pages in use lose their keys and are not matched again. Mutates."""
        self.drop(list(self._idle))
        for page in list(self._key_of):
            self._forget(page)

    def check(self, requests: Iterable[Request]) -> None:
        """Reference counts equal the page tables; keys, idle pages and the pool agree. Does not mutate."""
        users = Counter(page for request in requests for page in request.pages)
        if users != Counter(self._refs):
            wrong = {page: (users[page], self._refs.get(page)) for page in set(users) ^ set(self._refs)} or "counts"
            raise InvariantViolation(f"paged: references differ from page tables: {wrong}")
        if set(self._idle) & set(self._refs) or not set(self._idle) <= set(self._key_of):
            raise InvariantViolation("paged: an idle page is in use or has no key")
        if set(self._refs) | set(self._idle) != self._pool.held:
            raise InvariantViolation("paged: pages lost: held by the cache and neither used nor idle")
        indexed = {page: digest for digest, pages in self._pages_of.items() for page in pages}
        if indexed != self._key_of or not set(self._key_of) <= self._pool.held:
            raise InvariantViolation("paged: the index differs from the pages' keys")

    # ---- inside

    def _chain(self, request: Request) -> _Chain:
        if not isinstance(request.kv_state, _Chain):
            request.kv_state = _Chain()
        return request.kv_state

    def _digests(self, request: Request, count: int) -> list[bytes]:
        """The digests of the request's first ``count`` pages, or more; computed once, as tokens become known."""
        digests = self._chain(request).digests
        size, tokens = self._page_size, request.tokens
        for number in range(len(digests), count):
            parent = digests[-1] if digests else request.namespace
            digests.append(page_digest(parent, tokens[number * size : (number + 1) * size]))
        return digests

    def _forget(self, page: int) -> None:
        digest = self._key_of.pop(page)
        copies = self._pages_of[digest]
        copies.remove(page)
        if not copies:
            del self._pages_of[digest]
