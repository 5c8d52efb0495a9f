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

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from pydantic import Field

from engine.core.errors import InvariantViolation
from engine.core.identity import first_known, page_digests
from engine.core.plan import Candidate, KVNumbers
from engine.core.protocols import Context, KVCache, Match, PluginOptions, Publication
from engine.core.request import Request
from engine.plugins.kvcache._times import Times

if TYPE_CHECKING:
    from engine.core.cache_watch import CacheWatcher


PATIENCE = 64  # a request that writes prolongs its earlier pages once in so many parts of its ``cache_ttl``


class _Chain:
    """A request's page digests so far, and how many of its pages are published."""

    __slots__ = ("digests", "published", "until")

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.published = 0
        self.until = 0.0  # with a ``cache_ttl``: what its pages were prolonged to last


class PagedCache(KVCache):
    """Prefix cache indexed by the chained digest of each full page."""

    name = "paged"
    aliases = ("block-hash", "vllm")
    provides = frozenset({"prefix-cache"})
    publish_when = "planned"
    keeps_time = True

    class Options(PluginOptions):
        enable_prefix_caching: bool = Field(True, description="reuse KV of equal prefixes")
        drop_last_page: bool = Field(False, description="recompute the last page of a hit (EAGLE drafters need it)")

    def start(self, context: Context) -> None:
        self._pool = context.pool
        self._page_size = context.pool.page_size
        self.caching = self.options.enable_prefix_caching
        pages = self._pool.num_pages
        self._refs = [0] * pages  # requests that use the page
        self._used = 0  # pages that somebody uses
        self._key_of: list[bytes | None] = [None] * pages
        self._page_of: dict[bytes, int] = {}  # the oldest page with this key
        self._copies: dict[bytes, list[int]] = {}  # younger ones: pages computed twice are both kept
        # In the order of eviction. A plain dict would walk over all that was taken off its front.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._until = Times()  # pages that are found for a time only
        self._watcher: CacheWatcher | None = None

    # ---- the protocol

    def match(self, request: Request) -> Match:
        """Whole pages whose digests are known, at most ``num_tokens - 1`` tokens. Mutates nothing."""
        if not self.caching:
            return Match(0, (), 0)
        pages: list[int] = []
        longest = (request.num_tokens - 1) // self._page_size
        for page in map(self._page_of.get, islice(self._digests(request, longest), longest)):
            if page is None:
                break
            pages.append(page)
        if pages and self.options.drop_last_page:
            pages.pop()
        return Match(len(pages) * self._page_size, pages, sum(map(self._idle.__contains__, pages)))

    def adopt(self, request: Request, match: Match) -> list[int]:
        """Count the request among the users of the matched pages. Mutates."""
        refs, idle = self._refs, self._idle
        for page in match.pages:
            if refs[page]:
                refs[page] += 1
            else:
                refs[page] = 1
                self._used += 1
                del idle[page]
        self._chain(request).published = len(match.pages)
        if self._until:
            self._until.used(match.pages, request)
        return list(match.pages)

    def take(self, request: Request, count: int) -> list[int]:
        """Private pages off the front of the free queue. Mutates."""
        pages = self._pool.take(count)
        refs = self._refs
        for page in pages:
            refs[page] = 1
        self._used += count
        return pages

    def publish(self, request: Request, upto: int) -> Publication:
        """Give the request's full pages up to ``upto`` tokens their keys. Mutates."""
        full = upto // self._page_size
        if not self.caching:
            return Publication()
        chain = self._chain(request)
        first = chain.published
        if full <= first:
            return Publication()
        keys = tuple(zip(request.pages[first:full], self._digests(request, full)[first:full], strict=True))
        key_of, page_of = self._key_of, self._page_of
        for page, digest in keys:
            key_of[page] = digest
            if page_of.setdefault(digest, page) != page:
                self._copies.setdefault(digest, []).append(page)
        chain.published = full
        if request.cache_ttl is not None:
            until = self._until.wrote(request.pages[first:full], request.cache_ttl)
            if first and until - chain.until > request.cache_ttl / PATIENCE:
                self._until.prolong(request.pages[:first], until)
                chain.until = until
        if self._watcher is not None:
            parent = chain.digests[first - 1] if first else None
            self._watcher.stored(request, first, request.pages[first:full], chain.digests[first:full], parent)
        return Publication(keys)

    def unpublish(self, keys: Sequence[object]) -> None:
        """Pages lose the keys that they were published under; idle ones return to the pool. Mutates."""
        for key in keys:
            if not isinstance(key, tuple):
                continue
            page, digest = key
            if self._key_of[page] == digest:
                self._forget(page)
                if self._watcher is not None:
                    self._watcher.removed((page,))
                if page in self._idle:
                    del self._idle[page]
                    self._pool.give((page,))

    def release(self, request: Request, keep: int) -> None:
        """One user fewer for each page, tail first. Content keeps its key until the page is reused. Mutates."""
        freed: list[int] = []
        refs, key_of, idle = self._refs, self._key_of, self._idle
        for page in reversed(request.pages):
            left = refs[page] = refs[page] - 1
            if left:
                continue
            self._used -= 1
            if key_of[page] is not None:
                idle[page] = None
            else:
                freed.append(page)
        self._chain(request).published = 0
        if freed:
            self._pool.give(freed, front=self.caching)

    def victims(self, need: int) -> Sequence[object]:
        """The idle pages that were released first. Does not mutate."""
        return list(islice(self._idle, need))

    def candidates(self) -> Sequence[Candidate]:
        """Idle pages, first to go first. Does not mutate."""
        return [Candidate(page, 1, age) for age, page in enumerate(self._idle)]

    def drop(self, keys: Iterable[object], need: int | None = None) -> int:
        """Idle pages by number lose their keys and return to the pool. Mutates."""
        dropped = self._drop(keys, need)
        if dropped and self._watcher is not None:
            self._watcher.removed(dropped)
        return len(dropped)

    def numbers(self) -> KVNumbers:
        """Free, idle and used pages. Does not mutate."""
        pool = self._pool
        return KVNumbers(pool.num_pages, pool.num_free, len(self._idle), self._used, pool.page_size)

    def available(self) -> int:
        """Free and idle pages. Does not mutate."""
        return self._pool.num_free + len(self._idle)

    def reset(self) -> None:
        """Drop everything idle; pages in use lose their keys and are not matched again. Mutates."""
        self._drop(list(self._idle), None)
        for page, key in enumerate(self._key_of):
            if key is not None:
                self._forget(page)
        if self._watcher is not None:
            self._watcher.cleared()

    def expire(self, now: float) -> None:
        """Pages whose time is over lose their keys; idle ones return to the pool. Mutates."""
        over = self._until.over(now)
        if not over:
            return
        idle = [page for page in over if page in self._idle]
        for page in over:
            self._forget(page)
        for page in idle:
            del self._idle[page]
        self._pool.give(idle)
        if self._watcher is not None:
            self._watcher.removed(over)

    def watch(self, watcher: CacheWatcher) -> bool:
        """Tells of pages as they get and lose their keys. Mutates."""
        self._watcher = watcher
        return True

    def contents(self) -> dict[int, bytes]:
        """The pages that have keys. Does not mutate."""
        return {page: key for page, key in enumerate(self._key_of) if key is not None}

    def peek(self, namespace: bytes, packed: bytes) -> int:
        """Pages whose keys are known, up to the first whose is not. Does not mutate."""
        return first_known(page_digests(namespace, packed, self._page_size), self._page_of) if self.caching else 0

    def check(self, requests: Iterable[Request]) -> None:
        """Reference counts equal the page tables; keys, idle pages and the pool agree. Does not mutate."""
        users = Counter(page for request in requests for page in request.pages)
        used = {page: refs for page, refs in enumerate(self._refs) if refs}
        if users != Counter(used) or len(used) != self._used:
            wrong = {page: (users[page], used.get(page)) for page in set(users) ^ set(used)} or "counts"
            raise InvariantViolation(f"paged: references differ from page tables: {wrong}")
        keyed = {page: key for page, key in enumerate(self._key_of) if key is not None}
        if set(self._idle) & set(used) or not set(self._idle) <= set(keyed):
            raise InvariantViolation("paged: an idle page is in use or has no key")
        if set(used) | set(self._idle) != self._pool.held:
            raise InvariantViolation("paged: pages lost: held by the cache and neither used nor idle")
        indexed = {page: digest for digest, page in self._page_of.items()}
        indexed |= {page: digest for digest, pages in self._copies.items() for page in pages}
        if not all(self._copies.values()) or not set(self._copies) <= set(self._page_of):
            raise InvariantViolation("paged: copies of a page that is not there")
        if indexed != keyed or not set(keyed) <= self._pool.held:
            raise InvariantViolation("paged: the index differs from the pages' keys")
        if not self._until.pages() <= set(keyed):
            raise InvariantViolation("paged: a page without a key has a time")

    # ---- inside

    def _chain(self, request: Request) -> _Chain:
        if not isinstance(request.kv_state, _Chain):
            request.kv_state = _Chain()
        return request.kv_state

    def _digests(self, request: Request, count: int) -> list[bytes]:
        """The digests of the request's first ``count`` pages, or more; computed once, as tokens become known."""
        digests = self._chain(request).digests
        request.digest_pages(digests, count, self._page_size)
        return digests

    def _drop(self, keys: Iterable[object], need: int | None) -> list[int]:
        idle = self._idle
        chosen = dict.fromkeys([page for page in keys if isinstance(page, int) and page in idle])
        dropped = list(islice(chosen, need))
        key_of, page_of, copies = self._key_of, self._page_of, self._copies
        for page in dropped:
            del idle[page]
            digest = key_of[page]
            if digest is None or digest in copies:
                self._forget(page)
            else:
                key_of[page] = None
                del page_of[digest]
        if self._until:
            self._until.forget(dropped)
        self._pool.give(dropped)
        return dropped

    def _forget(self, page: int) -> None:
        digest = self._key_of[page]
        assert digest is not None
        self._key_of[page] = None
        if self._until:
            self._until.forget((page,))
        copies = self._copies.get(digest)
        if copies is None:
            del self._page_of[digest]
            return
        if self._page_of[digest] == page:
            self._page_of[digest] = copies.pop(0)
        else:
            copies.remove(page)
        if not copies:
            del self._copies[digest]
