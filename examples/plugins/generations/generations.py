"""``generations``: a prefix cache that one-off prompts do not wash out. Source: segmented LRU (Karedla et al., 1994).

A trie with one node a page. A request pins the path of its published pages; behind it are pages of its own:

    request.pages:  [ --- the trie's, pinned: path --- | --- private --- ]

An idle node waits in one of two lines: ``young`` (nobody asked for it twice) or ``old`` (found again: protected).
Eviction takes from the front of the young, then of the old. A request lets go of its tail first, so that children stand
before their parents, and whoever finds a page again has found all pages before it: the front is always a leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from pydantic import Field

from engine.core import (
    Candidate,
    Context,
    InvariantViolation,
    KVCache,
    KVNumbers,
    Match,
    PluginOptions,
    Publication,
    Request,
)


class Node:
    """One page of content: its tokens, what came before it, and how many requests use it now. A root holds none."""

    __slots__ = ("children", "key", "page", "parent", "protected", "root", "users")

    def __init__(self, parent: Node | None = None, key: bytes = b"", page: int = -1) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.root: Node = self if parent is None else parent.root
        self.children: dict[bytes, Node] = {}
        self.users = 0
        self.protected = False


class GenerationsCache(KVCache):
    """Prefix cache in two generations: what was found again outlives what was not."""

    name = "generations"
    provides = frozenset({"prefix-cache"})
    publish_when = "committed"

    class Options(PluginOptions):
        protected: float = Field(0.8, ge=0, le=1, description="most of the pool that idle protected pages may fill")

    def start(self, context: Context) -> None:
        """An empty trie."""
        self._pool = context.pool
        self._page_size = context.pool.page_size
        self._most_old = int(self.options.protected * context.pool.num_pages)
        self._root = Node()
        self._young: dict[Node, None] = {}  # insertion order is the order of eviction
        self._old: dict[Node, None] = {}
        self._held = 0  # pages of ours: private, in use or idle

    # ---- the life of a request

    def match(self, request: Request) -> Match:
        """Page by page down the trie, at most ``num_tokens - 1`` tokens. Mutates nothing."""
        path: list[Node] = []
        children = self._root.children
        for place in range((request.num_tokens - 1) // self._page_size):
            node = children.get(self._key(request, place))
            if node is None:
                break
            path.append(node)
            children = node.children
        pages = [node.page for node in path]
        return Match(len(path) * self._page_size, pages, sum(not node.users for node in path), path)

    def adopt(self, request: Request, match: Match) -> list[int]:
        """Pin the path that was found; all of it is protected from now on. Mutates."""
        path: list[Node] = list(match.handle or ())
        for node in path:
            self._use(node)
            node.protected = True
        request.kv_state = path
        return [node.page for node in path]

    def take(self, request: Request, count: int) -> list[int]:
        """Private pages off the pool. Mutates."""
        pages = self._pool.take(count)
        self._held += count
        return pages

    def publish(self, request: Request, upto: int) -> Publication:
        """Private pages become nodes; where one is there already, the request goes over to it. Mutates."""
        path: list[Node] = request.kv_state
        first, full = len(path), upto // self._page_size
        duplicates: list[int] = []
        node = path[-1] if path else self._root
        for place in range(first, full):
            key, page = self._key(request, place), request.pages[place]
            known = node.children.get(key)
            if known is None:
                known = node.children[key] = Node(node, key, page)
            else:
                duplicates.append(page)
            self._use(known)
            path.append(known)
            node = known
        if not duplicates:
            return Publication()
        self._give(duplicates)
        return Publication((), [*(node.page for node in path), *request.pages[len(path) :]])

    def unpublish(self, keys: Sequence[object]) -> None:
        """Nothing is published before it is committed. Does nothing."""

    def release(self, request: Request, keep: int) -> None:
        """Publish what is to be kept, unpin the path, tail first, and return the private pages. Mutates."""
        if not request.pages:
            return
        pages = self.publish(request, keep).pages or request.pages
        path: list[Node] = request.kv_state
        private = pages[len(path) :]
        for node in reversed(path):
            node.users -= 1
            if not node.users:
                self._rest(node)
        request.kv_state = []
        self._give(private)

    # ---- eviction

    def victims(self, need: int) -> Sequence[object]:
        """The front of the young, then of the old. Does not mutate."""
        return list(islice(chain(self._young, self._old), need))

    def candidates(self) -> Sequence[Candidate]:
        """Idle leaves, first to go first. Does not mutate."""
        idle = enumerate(chain(self._young, self._old))
        return [Candidate(node, 1, age) for age, node in idle if not node.children]

    def drop(self, keys: Iterable[object], need: int | None = None) -> int:
        """Evict idle leaves. Mutates."""
        freed: list[int] = []
        for node in keys:
            if need is not None and len(freed) >= need:
                break
            if isinstance(node, Node) and not node.children and (node in self._young or node in self._old):
                self._line(node).pop(node)
                self._cut(node)
                freed.append(node.page)
        self._give(freed)
        return len(freed)

    def reset(self) -> None:
        """Forget everything: idle pages are free now, those in use when their users let go. Mutates."""
        self.drop(list(chain(self._young, self._old)))
        self._root = Node()

    # ---- the books

    def numbers(self) -> KVNumbers:
        """Free, idle, and all other pages that are ours. Does not mutate."""
        idle = len(self._young) + len(self._old)
        return KVNumbers(self._pool.num_pages, self._pool.num_free, idle, self._held - idle, self._page_size)

    def check(self, requests: Iterable[Request]) -> None:
        """Users, lines, trie and pool agree. Does not mutate."""
        running = list(requests)
        users = Counter(node for request in running for node in request.kv_state)
        private = [page for request in running for page in request.pages[len(request.kv_state) :]]
        for request in running:
            if [node.page for node in request.kv_state] != request.pages[: len(request.kv_state)]:
                raise InvariantViolation(f"generations: {request!r} does not use the pages of its path")
        nodes = set(users) | set(self._nodes())
        if any(node.users != users[node] for node in nodes):
            raise InvariantViolation("generations: users of a page are miscounted")
        idle = [*self._young, *self._old]
        if set(idle) != {node for node in nodes if not node.users} or len(set(idle)) != len(idle):
            raise InvariantViolation("generations: an idle page stands in no line, or in two")
        place = {node: at for at, node in enumerate(idle)}
        if any(place[child] > place[node] for node in idle for child in node.children.values()):
            raise InvariantViolation("generations: a page would go before one that needs it")
        owned = [*private, *(node.page for node in nodes)]
        if len(set(owned)) != len(owned) or set(owned) != self._pool.held or len(owned) != self._held:
            raise InvariantViolation("generations: a page is lost or has two owners")

    # ---- inside

    def _key(self, request: Request, place: int) -> bytes:
        """What a page is called among its siblings. Namespaces part at the first page, for good."""
        tokens = request.packed_tokens(place * self._page_size, (place + 1) * self._page_size)
        return tokens if place else request.namespace + tokens

    def _line(self, node: Node) -> dict[Node, None]:
        return self._old if node in self._old else self._young

    def _use(self, node: Node) -> None:
        if not node.users and (node in self._young or node in self._old):
            del self._line(node)[node]
        node.users += 1

    def _rest(self, node: Node) -> None:
        """Nobody uses the node any more: to the end of its line, or away if what it continues was forgotten."""
        if node.root is not self._root:
            self._cut(node)
            self._give([node.page])
            return
        (self._old if node.protected else self._young)[node] = None
        if len(self._old) > self._most_old:
            demoted = next(iter(self._old))
            del self._old[demoted]
            demoted.protected = False
            self._young[demoted] = None

    def _cut(self, node: Node) -> None:
        if node.parent is not None and node.parent.children.get(node.key) is node:
            del node.parent.children[node.key]

    def _give(self, pages: Sequence[int]) -> None:
        self._pool.give(pages)
        self._held -= len(pages)

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()
