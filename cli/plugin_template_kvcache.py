"""The code of a new KV cache. ``@WORD@`` is filled in."""

from __future__ import annotations

KVCACHE = '''
"""@NAME@: a KV cache. It keeps who uses each page and which content can be found again; the core drives it."""

from collections import Counter

from pydantic import Field

from engine.core import Candidate, InvariantViolation, KVCache, KVNumbers, Match, PluginOptions, Publication
from engine.core.identity import page_digests


class @CLASS@(KVCache):
    """Finds pages by a digest of their tokens and all before them; the page unused for longest goes first."""

    name = "@NAME@"
    requires_api = ">=1.0,<2"
    provides = frozenset({"prefix-cache"})
    publish_when = "committed"

    class Options(PluginOptions):
        enabled: bool = Field(True, description="remember content at all")

    def start(self, context):
        """Page counts are known from here on."""
        self._pool = context.pool
        self._page_size = context.pool.page_size
        self.caching = self.options.enabled
        self._users = Counter()  # page -> requests that use it
        self._page_of = {}  # digest -> page
        self._digest_of = {}  # page -> digest
        self._idle = {}  # pages that nobody uses and that can be found; the first goes first

    def match(self, request):
        """Whole pages from the beginning, never the last token. Pins nothing."""
        pages = []
        for digest in self._digests(request, request.num_tokens - 1) if self.caching else ():
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return Match(len(pages) * self._page_size, pages, sum(page in self._idle for page in pages))

    def adopt(self, request, match):
        """The request uses the matched pages, too."""
        for page in match.pages:
            self._users[page] += 1
            self._idle.pop(page, None)
        return list(match.pages)

    def take(self, request, count):
        """Private pages."""
        pages = self._pool.take(count)
        self._users.update(pages)
        return pages

    def publish(self, request, upto):
        """Full pages become known by their digests. A page whose content is known already stays private."""
        keys = []
        for page, digest in zip(request.pages, self._digests(request, upto) if self.caching else ()):
            if page not in self._digest_of and digest not in self._page_of:
                self._digest_of[page], self._page_of[digest] = digest, page
                keys.append(page)
        return Publication(keys)

    def unpublish(self, keys):
        """These pages are not found again."""
        for page in keys:
            if isinstance(page, int) and page in self._digest_of:
                self._forget(page)
                if self._idle.pop(page, 0) is None:
                    self._pool.give([page])

    def release(self, request, keep):
        """One user fewer for each page; what nobody uses is idle if it can be found, else free."""
        self.publish(request, keep)  # nobody else does, of a request that ends
        free = []
        for page in reversed(request.pages):
            self._users[page] -= 1
            if not self._users[page]:
                del self._users[page]
                if page in self._digest_of:
                    self._idle[page] = None
                else:
                    free.append(page)
        self._pool.give(free)

    def victims(self, need):
        """The idle pages released first."""
        return list(self._idle)[:need]

    def candidates(self):
        """All idle pages, the first to go first."""
        return [Candidate(page, 1, age) for age, page in enumerate(self._idle)]

    def drop(self, keys, need=None):
        """Idle pages go back to the pool."""
        dropped = []
        for page in keys:
            if need is not None and len(dropped) >= need:
                break
            if isinstance(page, int) and page in self._idle:
                del self._idle[page]
                self._forget(page)
                dropped.append(page)
        self._pool.give(dropped)
        return len(dropped)

    def numbers(self):
        """Every page is free, idle or used."""
        pool = self._pool
        return KVNumbers(pool.num_pages, pool.num_free, len(self._idle), len(self._users), pool.page_size)

    def reset(self):
        """Nothing that is known now is found again."""
        self.drop(list(self._idle))
        for page in list(self._digest_of):
            self._forget(page)

    def check(self, requests):
        """Books and page tables agree."""
        used = Counter(page for request in requests for page in request.pages)
        if used != self._users:
            raise InvariantViolation("@NAME@: users differ from page tables")
        if set(used) & set(self._idle) or set(used) | set(self._idle) != self._pool.held:
            raise InvariantViolation("@NAME@: a page is lost or has two states")
        if {page: digest for digest, page in self._page_of.items()} != self._digest_of:
            raise InvariantViolation("@NAME@: the index differs from the pages' digests")

    def _digests(self, request, upto):
        """Digests of the full pages in the first ``upto`` tokens; the namespace is part of each."""
        size = self._page_size
        end = upto // size * size
        known = request.kv_state or []
        if len(known) * size < end:
            parent = known[-1] if known else request.namespace
            known = [*known, *page_digests(parent, request.packed_tokens(len(known) * size, end), size)]
            request.kv_state = known
        return known[: end // size]

    def _forget(self, page):
        del self._page_of[self._digest_of.pop(page)]
'''
