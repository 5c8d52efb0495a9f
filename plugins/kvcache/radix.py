"""``radix``: a tree of token sequences, page-aligned. Source: RadixAttention (SGLang).

A node owns the pages of its stretch of tokens. A request pins the path from the root to its last node; pinned nodes
cannot be evicted. Behind that prefix its pages are private:

    request.pages:  [ ---- tree's, pinned through `node` ---- | -- private -- ]
                    0                              hold.pages                 len

``publish`` inserts the private stretch; where the tree already has the same tokens, the tree's pages win and the
request's duplicates return to the pool. Only unpinned leaves are evicted; a parent becomes a leaf when its last child
goes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from pydantic import Field

from engine.core.errors import InvariantViolation
from engine.core.plan import Candidate, KVNumbers
from engine.core.protocols import Context, KVCache, Match, PluginOptions, Publication
from engine.core.request import Request

Branch = tuple[object, ...]
HEAP_SLACK = 64


class Node:
    """A stretch of tokens with its pages. ``locks`` counts the requests whose path goes through it."""

    __slots__ = ("branch", "children", "created", "hits", "locks", "pages", "parent", "tokens", "used")

    def __init__(self, parent: Node | None, branch: Branch, tokens: list[int], pages: list[int], now: int) -> None:
        self.parent = parent
        self.branch = branch  # key among the parent's children: its first page (and the namespace, below the root)
        self.tokens = tokens
        self.pages = pages
        self.children: dict[Branch, Node] = {}
        self.locks = 0
        self.hits = 0
        self.created = now
        self.used = now


class Hold:
    """What a request pins: the path to ``node``, which covers its first ``pages`` pages."""

    __slots__ = ("node", "pages")

    def __init__(self, node: Node, pages: int) -> None:
        self.node = node
        self.pages = pages


class RadixCache(KVCache):
    """Prefix cache as a radix tree with leaf eviction, least recently used first."""

    name = "radix"
    aliases = ("sglang",)
    provides = frozenset({"prefix-cache"})
    publish_when = "prefilled"

    class Options(PluginOptions):
        enable_prefix_caching: bool = Field(True, description="reuse KV of equal prefixes")

    def start(self, context: Context) -> None:
        self._pool = context.pool
        self._page_size = context.pool.page_size
        self._caching: bool = self.options.enable_prefix_caching
        self._clock = 0
        self._root = Node(None, (), [], [], 0)
        self._root.locks = 1
        self._private = 0
        self._pinned = 0
        self._evictable = 0
        self._heap: list[tuple[int, int, Node]] = []  # leaves by last use; entries gone stale are skipped when met
        self._entries = 0
        self._count = 0  # nodes in the tree

    # ---- the protocol

    def match(self, request: Request) -> Match:
        """Longest cached prefix, page by page. Mutates recency, and splits the node that it ends in."""
        if not self._caching:
            return Match(0, (), 0)
        upto = (request.num_tokens - 1) // self._page_size * self._page_size
        node, pages = self._walk(request, upto)
        idle = sum(len(n.pages) for n in self._path(node) if not n.locks)
        return Match(len(pages) * self._page_size, pages, idle, node)

    def adopt(self, request: Request, match: Match) -> list[int]:
        """Pin the matched path. Mutates."""
        node: Node = match.handle or self._root
        self._lock(node)
        request.kv_state = Hold(node, len(match.pages))
        return list(match.pages)

    def take(self, request: Request, count: int) -> list[int]:
        """Private pages off the pool. Mutates."""
        pages = self._pool.take(count)
        self._private += count
        return pages

    def publish(self, request: Request, upto: int) -> Publication:
        """Insert the first ``upto`` tokens; identical content in the tree replaces the request's pages. Mutates."""
        hold: Hold = request.kv_state
        full = upto // self._page_size
        if not self._caching or full <= hold.pages:
            return Publication()
        node, pages = self._insert(request, full)
        self._lock(node)
        self._unlock(hold.node)
        request.kv_state = Hold(node, full)
        return Publication((), [*pages, *request.pages[full:]])

    def unpublish(self, keys: Sequence[object]) -> None:
        """Nothing is ever published before it is committed. Does nothing."""

    def release(self, request: Request, keep: int) -> None:
        """Unpin the path and return the private pages, after inserting the first ``keep`` tokens. Mutates."""
        hold = request.kv_state
        if not isinstance(hold, Hold):
            return
        covered = hold.pages
        full = min(keep // self._page_size, len(request.pages))
        if self._caching and full > covered:
            self._insert(request, full)
            covered = full
        rest = request.pages[covered:]
        self._private -= len(rest)
        self._pool.give(rest)
        self._unlock(hold.node)
        request.kv_state = None

    def victims(self, need: int) -> Sequence[object]:
        """Unpinned leaves, least recently used first, parents as they become leaves. The tree is not changed."""
        found: list[object] = []
        gone: set[Node] = set()
        children: dict[Node, int] = {}
        entries: list[tuple[int, int, Node]] = []
        heap = self._heap
        while heap and need > 0:
            entry = heapq.heappop(heap)
            node = entry[2]
            if node in gone or node.locks or not self._alive(node) or children.get(node, len(node.children)):
                continue
            if node.used != entry[0]:
                self._push(node)
                continue
            entries.append(entry)
            found.append(node)
            gone.add(node)
            need -= len(node.pages)
            parent = node.parent
            assert parent is not None  # the root is pinned for ever
            children[parent] = children.get(parent, len(parent.children)) - 1
            if not children[parent] and not parent.locks:
                self._push(parent)
        for entry in entries:
            heapq.heappush(heap, entry)
        return found

    def candidates(self) -> Sequence[Candidate]:
        """Unpinned leaves. Does not mutate."""
        leaves = [node for node in self._nodes() if not node.locks and not node.children]
        return [Candidate(node, len(node.pages), node.used) for node in sorted(leaves, key=lambda node: node.used)]

    def drop(self, keys: Iterable[object], need: int | None = None) -> int:
        """Evict these leaves, in order. Mutates."""
        freed = 0
        for node in keys:
            if need is not None and freed >= need:
                break
            if isinstance(node, Node) and not node.locks and not node.children and self._alive(node):
                parent = node.parent
                assert parent is not None
                del parent.children[node.branch]
                node.parent = None
                self._count -= 1
                self._evictable -= len(node.pages)
                self._pool.give(node.pages)
                freed += len(node.pages)
                self._offer(parent)
        return freed

    def numbers(self) -> KVNumbers:
        """Free, evictable and pinned (private or on a pinned path) pages. Does not mutate."""
        pool = self._pool
        return KVNumbers(pool.num_pages, pool.num_free, self._evictable, self._pinned + self._private, pool.page_size)

    def reset(self) -> None:
        """Evict all that is unpinned. Mutates."""
        while self._evictable:
            self.drop(self.victims(self._evictable))

    def check(self, requests: Iterable[Request]) -> None:
        """Locks equal the requests' paths; every held page is in one node or private to one request. No mutation."""
        locks: dict[Node, int] = {}
        private: list[int] = []
        for request in requests:
            hold: Hold = request.kv_state
            path = list(self._path(hold.node))
            for node in path:
                locks[node] = locks.get(node, 0) + 1
            pages = [page for node in reversed(path) for page in node.pages]
            if pages != request.pages[: hold.pages]:
                raise InvariantViolation(f"radix: {request!r} does not use the pages of the path it pins")
            private += request.pages[hold.pages :]
        self._check_tree(locks)
        owned = private + [page for node in self._nodes() for page in node.pages]
        if len(set(owned)) != len(owned) or set(owned) != self._pool.held or len(private) != self._private:
            raise InvariantViolation("radix: a page is lost or has two owners")

    # ---- the tree

    def _walk(self, request: Request, upto: int) -> tuple[Node, list[int]]:
        """Follow the request's tokens down; returns the last node, split so that it ends with the match."""
        self._clock += 1
        size, tokens = self._page_size, request.tokens
        node, at, pages = self._root, 0, list[int]()
        while at < upto:
            child = node.children.get(self._branch(request, at, node))
            if child is None:
                break
            common = self._common(child, tokens, at, upto)  # at least one page: the branch is its first
            if common < len(child.pages):
                child = self._split(child, common)
            child.used = self._clock
            pages += child.pages
            at += len(child.pages) * size
            node = child
        return node, pages

    def _insert(self, request: Request, full: int) -> tuple[Node, list[int]]:
        """Bring the tree up to the request's first ``full`` pages; private pages move in or return as duplicates."""
        hold: Hold = request.kv_state
        size = self._page_size
        node, pages = self._walk(request, full * size)
        have = len(pages)
        duplicates = request.pages[hold.pages : have]
        self._pool.give(duplicates)
        self._private -= len(duplicates)
        if have < full:
            new = request.pages[have:full]
            branch = self._branch(request, have * size, node)
            child = Node(node, branch, request.tokens[have * size : full * size], new, self._clock)
            node.children[child.branch] = child
            self._count += 1
            self._private -= len(new)
            self._evictable += len(new)
            self._offer(child)
            node = child
            pages = pages + new
        for passed in self._path(node):
            passed.hits += 1
        return node, pages

    def _branch(self, request: Request, at: int, parent: Node) -> Branch:
        first = tuple(request.tokens[at : at + self._page_size])
        return (request.namespace, *first) if parent is self._root else first

    def _common(self, node: Node, tokens: list[int], at: int, upto: int) -> int:
        """Whole pages that the node shares with ``tokens[at:upto]``."""
        size = self._page_size
        stretch = tokens[at : min(upto, at + len(node.tokens))]
        if stretch == node.tokens:
            return len(node.pages)
        low, high = 0, len(stretch) // size
        while low < high:
            middle = (low + high + 1) // 2
            if stretch[: middle * size] == node.tokens[: middle * size]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: Node, pages: int) -> Node:
        """Cut a node in two; returns the new upper part. Whoever pinned the node keeps meaning the lower part."""
        assert node.parent is not None
        cut = pages * self._page_size
        upper = Node(node.parent, node.branch, node.tokens[:cut], node.pages[:pages], self._clock)
        upper.locks, upper.hits = node.locks, node.hits
        node.parent.children[upper.branch] = upper
        node.tokens, node.pages = node.tokens[cut:], node.pages[pages:]
        node.parent, node.branch = upper, tuple(node.tokens[: self._page_size])
        upper.children[node.branch] = node
        self._count += 1
        return upper

    def _path(self, node: Node) -> Iterator[Node]:
        """From a node up to, not including, the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _lock(self, node: Node) -> None:
        for passed in self._path(node):
            if not passed.locks:
                self._evictable -= len(passed.pages)
                self._pinned += len(passed.pages)
            passed.locks += 1

    def _unlock(self, node: Node) -> None:
        for passed in self._path(node):
            passed.locks -= 1
            if not passed.locks:
                self._evictable += len(passed.pages)
                self._pinned -= len(passed.pages)
                self._offer(passed)

    # ---- eviction order

    def _offer(self, node: Node) -> None:
        """The node may have become an evictable leaf."""
        if node.locks or node.children:
            return
        if len(self._heap) > 2 * self._count + HEAP_SLACK:  # mostly stale: without a shortage nobody meets them
            leaves = [leaf for leaf in self._nodes() if not leaf.locks and not leaf.children and leaf is not node]
            self._heap = [(leaf.used, number, leaf) for number, leaf in enumerate(leaves)]
            heapq.heapify(self._heap)
            self._entries = len(leaves)
        self._push(node)

    def _push(self, node: Node) -> None:
        self._entries += 1
        heapq.heappush(self._heap, (node.used, self._entries, node))

    @staticmethod
    def _alive(node: Node) -> bool:
        return node.parent is not None and node.parent.children.get(node.branch) is node

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _check_tree(self, locks: dict[Node, int]) -> None:
        evictable = pinned = 0
        for node in self._nodes():
            if node.locks != locks.get(node, 0):
                raise InvariantViolation(f"radix: a node has {node.locks} locks and {locks.get(node, 0)} users")
            if len(node.tokens) != len(node.pages) * self._page_size or not node.pages:
                raise InvariantViolation("radix: a node's tokens are not whole pages")
            if node.locks:
                pinned += len(node.pages)
            else:
                evictable += len(node.pages)
        if sum(1 for _ in self._nodes()) != self._count:
            raise InvariantViolation("radix: the number of nodes is wrong")
        if (evictable, pinned) != (self._evictable, self._pinned):
            raise InvariantViolation(
                f"radix: counts {self._evictable} evictable, {self._pinned} pinned; the tree has {evictable}, {pinned}"
            )
