"""``radix``: cached prefixes in a radix tree. Source: RadixAttention (SGLang).

A request pins the path from the root to its last node; pinned nodes cannot be evicted. Behind that prefix its pages
are private:

    request.pages:  [ ---- tree's, pinned through `node` ---- | -- private -- ]
                    0                              hold.pages                 len

``publish`` inserts the private stretch; where the tree already has the same tokens, the tree's pages win and the
request's duplicates return to the pool. Only unpinned leaves are evicted, whole ones; a parent becomes a leaf when its
last child goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from engine.core.errors import ConfigError, InvariantViolation
from engine.core.identity import page_digests
from engine.core.plan import Candidate, KVNumbers
from engine.core.protocols import Context, KVCache, Match, Outlined, PluginOptions, Publication
from engine.core.request import Request
from engine.plugins.kvcache._radix_node import Node, below, outline, path
from engine.plugins.kvcache._radix_sessions import Sessions
from engine.plugins.kvcache._radix_tree import TOKEN_BYTES, RadixTree

if TYPE_CHECKING:
    from engine.core.cache_watch import CacheWatcher


class Hold:
    """What the cache knows of a request: its tokens as a key, and what it pins: ``pages`` pages, down to ``node``.

    ``found`` is the last look-up's node and length in pages: whoever waits is looked up again and again. ``digests``
    are those of its first pages, where somebody watches.
    """

    __slots__ = ("digests", "found", "key", "node", "pages", "resets")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.node: Node | None = None
        self.pages = 0
        self.found: tuple[Node, int] | None = None
        self.resets = 0  # of the cache, when ``found`` was
        self.digests: list[bytes] = []


class RadixCache(KVCache):
    """Prefix cache as a radix tree with leaf eviction, least recently used first.

    Attribute ``tree`` is the tree itself, for whoever must see it: tools, tests, and orders by subtree.
    """

    name = "radix"
    aliases = ("sglang",)
    provides = frozenset({"prefix-cache"})
    publish_when = "prefilled"
    keeps_time = True

    class Options(PluginOptions):
        enable_prefix_caching: bool = Field(True, description="reuse KV of equal prefixes")
        eviction_policy: Literal["lru", "mru", "fifo", "filo", "lfu", "slru", "priority"] = Field(
            "lru", description="which unused leaf goes first: by last use, by age, by hits, or the least important"
        )

        session_slots: int = Field(
            0, ge=0, description="conversations (metadata 'session') whose prefix is evicted after all others"
        )
        session_ttl: float = Field(600.0, gt=0, description="seconds of silence after which a conversation is over")

    def start(self, context: Context) -> None:
        """Raises ``ConfigError`` where token ids do not fit in the keys."""
        if context.limits.vocab_size > 2 ** (8 * TOKEN_BYTES):
            raise ConfigError(f"kvcache radix: token ids must be below 2**32, not {context.limits.vocab_size}")
        self._pool = context.pool
        self._page_size = context.pool.page_size
        self.caching = self.options.enable_prefix_caching
        slots: int = self.options.session_slots
        self.tree = RadixTree(self._page_size, self.options.eviction_policy, keeps_warm=slots > 0)
        self.sessions = Sessions(self.tree, slots, self.options.session_ttl, context.clock) if slots else None
        self._private = 0
        self._resets = 0
        self._watcher: CacheWatcher | None = None

    # ---- the protocol

    def match(self, request: Request) -> Match:
        """Longest cached prefix, page by page. Mutates recency, and splits the node that it ends in."""
        return self._look_up(request, (len(request.tokens) - 1) // self._page_size)

    def probe(self, request: Request) -> Match:
        """The same over all tokens of the request; the handle is the last node. Mutates as ``match`` does."""
        return self._look_up(request, len(request.tokens) // self._page_size)

    def adopt(self, request: Request, match: Match) -> list[int]:
        """Pin the matched path. Mutates."""
        hold = request.kv_state or self._hold(request)
        hold.node = node = match.handle or self.tree.root
        hold.pages = match.tokens // self._page_size
        if not hold.pages:
            return []
        self.tree.lock(node)
        if self.tree.times and request.write_cache:
            self.tree.times.prolong(node, self._until(request))
        return self.tree.pages(node)

    def take(self, request: Request, count: int) -> list[int]:
        """Private pages off the pool. Mutates."""
        pages = self._pool.take(count)
        self._private += count
        return pages

    def take_each(self, requests: Sequence[Request]) -> list[int]:
        """Private pages off the pool, one each. Mutates."""
        pages = self._pool.take(len(requests))
        self._private += len(requests)
        return pages

    def publish(self, request: Request, upto: int) -> Publication:
        """Insert the first ``upto`` tokens; identical content in the tree replaces the request's pages. Mutates.

        The part of a prompt whose rest is still to come does not count as a use.
        """
        hold: Hold = request.kv_state
        full = upto // self._page_size
        if not self.caching:
            return Publication()
        before = hold.node
        assert before is not None
        if self.tree.is_lost(before):  # it goes on with what a reset forgot, or whose time is over
            return Publication()
        node = self._insert(request, hold, full, chunked=upto < request.prefill_target)
        self.tree.lock(node)
        self.tree.unlock(before)
        hold.node, hold.pages = node, full
        return Publication((), [*self.tree.pages(node), *request.pages[full:]])

    def unpublish(self, keys: Sequence[object]) -> None:
        """Nothing is ever published before it is committed. Does nothing."""

    def release(self, request: Request, keep: int) -> None:
        """Unpin the path and return the private pages, after inserting the first ``keep`` tokens. Mutates.

        Of a prompt in progress nothing is inserted: what it has published stays.
        """
        hold = request.kv_state
        if not isinstance(hold, Hold) or hold.node is None:
            return
        covered, end = hold.pages, hold.node
        full = min(keep // self._page_size, len(request.pages))
        cut = self.tree.is_lost(end)
        if self.caching and not cut and full and full >= covered and request.computed >= request.prefill_target:
            end = self._insert(request, hold, full, chunked=False)
            covered = full
        session = request.metadata.get("session") if self.sessions is not None and request.finished else None
        if self.sessions is not None and not cut and isinstance(session, str):
            self.sessions.keep(session, end)
        rest = request.pages[covered:]
        self._private -= len(rest)
        self._pool.give(rest)
        self.tree.unlock(hold.node)
        hold.node, hold.pages = None, 0
        if cut:
            self._sweep()

    def victims(self, need: int) -> Sequence[object]:
        """Unpinned leaves in the strategy's order, parents as they become leaves. The tree is not changed."""
        if self.sessions is not None:
            self.sessions.expire()
        return self.tree.victims(need)

    def candidates(self) -> Sequence[Candidate]:
        """Unpinned leaves in the strategy's order. Does not mutate."""
        return [Candidate(node, len(node.pages), node.used) for node in self.tree.leaves()]

    def drop(self, keys: Iterable[object], need: int | None = None) -> int:
        """Evict these leaves, in order. Mutates."""
        freed = self._drop(keys, need)
        if freed and self._watcher is not None:
            self._watcher.removed(freed)
        return len(freed)

    def numbers(self) -> KVNumbers:
        """Free, evictable and pinned (private or on a pinned path) pages. Does not mutate."""
        pool, tree = self._pool, self.tree
        return KVNumbers(pool.num_pages, pool.num_free, tree.evictable, tree.protected + self._private, pool.page_size)

    def available(self) -> int:
        """Free and evictable pages. Does not mutate."""
        return self._pool.num_free + self.tree.evictable

    def reset(self) -> None:
        """Nothing that is cached now is found again. What is pinned goes when those who pin it let go. Mutates."""
        if self.sessions is not None:
            self.sessions.clear()
        self._resets += 1
        self.tree.cut_off()
        self._sweep()
        if self._watcher is not None:
            self._watcher.cleared()

    def expire(self, now: float) -> None:
        """Nodes whose time is over are not found again; what nobody pins of them goes at once. Mutates."""
        gone = self.tree.expire(now)
        if not gone:
            return
        self._resets += 1
        if self._watcher is not None:
            nodes = dict.fromkeys(node for top in gone for node in (top, *below(top)))
            self._watcher.removed([page for node in nodes for page in node.pages])
        self._sweep()

    def watch(self, watcher: CacheWatcher) -> bool:
        """Tells of pages as they enter the tree and leave it; how nodes are cut is nobody's concern. Mutates."""
        self._watcher = watcher
        return True

    def contents(self) -> dict[int, bytes]:
        """The pages of the tree, with digests computed from its tokens. Does not mutate; costs time for each."""
        found: dict[int, bytes] = {}
        last: dict[Node, bytes] = {}
        for node in below(self.tree.root, found=True):
            assert node.parent is not None
            digests = page_digests(node.namespace or last[node.parent], node.key, self._page_size)
            found.update(zip(node.pages, digests, strict=True))
            last[node] = digests[-1]
        return found

    def peek(self, namespace: bytes, packed: bytes) -> int:
        """Pages on the way down. Does not mutate: no recency, no split."""
        return self.tree.peek(packed, namespace) if self.caching else 0

    def outline(self, most: int) -> list[Outlined]:
        """Nodes level by level, of each the newest children. Does not mutate."""
        return outline(self.tree.root, most, TOKEN_BYTES)

    def check(self, requests: Iterable[Request]) -> None:
        """Locks equal the requests' paths; every held page is in one node or private to one request. No mutation."""
        locks: dict[Node, int] = {}
        private: list[int] = []
        for request in requests:
            hold: Hold = request.kv_state
            assert hold.node is not None
            for node in path(hold.node):
                locks[node] = locks.get(node, 0) + 1
            if self.tree.pages(hold.node) != request.pages[: hold.pages]:
                raise InvariantViolation(f"radix: {request!r} does not use the pages of the path it pins")
            private += request.pages[hold.pages :]
        self.tree.check(locks)
        owned = private + [page for node in self.tree.nodes() for page in node.pages]
        if len(set(owned)) != len(owned) or set(owned) != self._pool.held or len(private) != self._private:
            raise InvariantViolation("radix: a page is lost or has two owners")

    # ---- inside

    def _look_up(self, request: Request, limit: int) -> Match:
        if not self.caching:
            return Match(0, (), 0)
        hold = self._hold(request)
        if hold.resets != self._resets:
            hold.found, hold.resets = None, self._resets
        hold.found = node, pages = self.tree.match(hold.key, request.namespace, limit, hold.found)
        return Match(pages * self._page_size, (), self.tree.idle(node) if pages else 0, node)

    def _hold(self, request: Request) -> Hold:
        """The request's state, its key brought up to its tokens."""
        hold: Hold | None = request.kv_state
        if hold is None:
            hold = request.kv_state = Hold(request.packed)
        known = len(hold.key) // TOKEN_BYTES
        if known < len(request.tokens):
            hold.key += request.packed_tokens(known, len(request.tokens))
        return hold

    def _insert(self, request: Request, hold: Hold, full: int, *, chunked: bool) -> Node:
        """Bring the tree up to the request's first ``full`` pages; private pages move in or return as duplicates."""
        key = self._hold(request).key[: full * self._page_size * TOKEN_BYTES]
        node, have = self.tree.insert(
            key, request.namespace, request.pages, priority=-request.priority, chunked=chunked
        )
        if full > hold.pages and (self.tree.times or request.cache_ttl is not None):
            until = self._until(request)
            if have < full:
                self.tree.times.set(node, until)
            self.tree.times.prolong(node, until)
        duplicates = request.pages[hold.pages : have]
        self._pool.give(duplicates)
        self._private -= full - hold.pages
        if self._watcher is not None and have < full:
            self._tell(request, hold, have, full)
        return node

    def _until(self, request: Request) -> float:
        return inf if request.cache_ttl is None else self.tree.times.now + request.cache_ttl

    def _tell(self, request: Request, hold: Hold, first: int, full: int) -> None:
        """The request's pages from ``first`` on are in the tree now."""
        assert self._watcher is not None
        digests = hold.digests
        request.digest_pages(digests, full, self._page_size)
        parent = digests[first - 1] if first else None
        self._watcher.stored(request, first, request.pages[first:full], digests[first:full], parent)

    def _sweep(self) -> None:
        """Give back what was cut off and nobody pins."""
        while fallen := self.tree.fallen():
            self._drop(fallen, None)

    def _drop(self, keys: Iterable[object], need: int | None) -> list[int]:
        """Take these leaves out and give their pages back; returns the pages."""
        freed: list[int] = []
        for node in keys:
            if need is not None and len(freed) >= need:
                break
            if not isinstance(node, Node):
                continue
            parent = node.parent
            if self.tree.remove(node):
                if self.sessions is not None and parent is not None:
                    self.sessions.evicted(node, parent)
                freed += node.pages
        self._pool.give(freed)
        return freed
