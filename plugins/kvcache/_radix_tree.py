"""The radix tree: token sequences by their whole pages, with pins, sizes and an eviction order kept at all times.

Keys are packed tokens (``core.identity.pack``), four bytes each, so that comparing a stretch is one ``memcmp``. A node
owns its stretch and the pages that hold its KV. All namespaces hang under one root, in one order of eviction: only the
branches below the root carry the namespace. Source: RadixAttention (SGLang).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from engine.core.errors import InvariantViolation
from engine.plugins.kvcache._radix_node import LEAF, STRATEGIES, Node, below, path
from engine.plugins.kvcache._radix_times import NodeTimes

Entry = tuple[Any, int, Node]
"""In the order of eviction: the strategy's key of a leaf, a number that makes entries unlike, the leaf."""

TOKEN_BYTES = 4
HEAP_SLACK = 64


class RadixTree:
    """Whole-page prefixes of token sequences. Counts are in pages.

    Args:
        page_size: tokens a page.
        strategy: which leaf goes first, one of ``STRATEGIES``.
        keeps_warm: nodes on a warm path go after all others.

    Attributes:
        root: pinned for ever, holds nothing.
        evictable: pages on no pinned path.
        protected: pages on a pinned path.
        count: nodes, the root not counted.
        cut: roots of what was cut off while it was pinned: never found again, and gone once nobody pins it.
    """

    def __init__(self, page_size: int, strategy: str = "lru", *, keeps_warm: bool = False) -> None:
        self.root = Node(None, b"", b"", [], 0)
        self.root.locks = 1
        self.evictable = 0
        self.protected = 0
        self.count = 0
        self.cut: list[Node] = []
        self.expired: list[Node] = []  # whose time was over, as long as somebody pins them
        self.times = NodeTimes()
        self._page = page_size * TOKEN_BYTES
        order = STRATEGIES[strategy]
        self._order = (lambda node: (node.warm > 0, order(node))) if keeps_warm else order
        self._falls = strategy == "mru"  # use makes a node go earlier, so its entry must be renewed at once
        self._clock = 0
        self._heap: list[Entry] = []  # evictable leaves; an entry may have aged: see ``victims``
        self._named: list[Entry] = []  # entries of the last ``victims``: most of these are not leaves any more
        self._entries = 0
        self._lost = 0

    # ---- to look up

    def match(
        self, key: bytes, namespace: bytes, limit: int | None = None, known: tuple[Node, int] | None = None
    ) -> tuple[Node, int]:
        """The longest prefix there is, in whole pages (at most ``limit`` of them): its last node, and its length.

        Mutates: every node on the way becomes recent, and a node that the prefix ends in is split.

        Args:
            known: the answer to an earlier look-up of this key, or of what was its beginning: as long as that node is
                in the tree, its path holds the same tokens, and the search goes on from there.
        """
        page = self._page
        end = len(key) // page * page
        if limit is not None:
            end = min(end, limit * page)
        node, at = self._walk(key, namespace, end, None, known)
        return node, at // page

    def peek(self, key: bytes, namespace: bytes) -> int:
        """The length of the longest prefix there is, in whole pages. Does not mutate, not even recency."""
        page, at, node = self._page, 0, self.root
        end = len(key) // page * page
        branch = namespace + key[:page]
        while at < end and (child := node.children.get(branch)) is not None:
            upto = min(at + len(child.key), end)
            common = self._common(child.key, key, at, upto)
            at += common
            if common < len(child.key):
                break
            node, branch = child, key[at : at + page]
        return at // page

    def pages(self, node: Node) -> list[int]:
        """The pages from the root down to the end of a node. Does not mutate."""
        stretches = [passed.pages for passed in path(node)]
        found: list[int] = []
        for stretch in reversed(stretches):
            found += stretch
        return found

    def idle(self, node: Node) -> int:
        """Pages on the path to a node that a pin would take out of ``evictable``. Does not mutate."""
        pages = 0
        while not node.locks:  # above a pinned node all are pinned
            pages += len(node.pages)
            assert node.parent is not None
            node = node.parent
        return pages

    # ---- to change

    def insert(
        self,
        key: bytes,
        namespace: bytes,
        pages: Sequence[int],
        *,
        priority: int = 0,
        chunked: bool = False,
    ) -> tuple[Node, int]:
        """Add the whole pages of a key; returns its last node and how many pages were there already.

        The tree keeps its own pages for that part and takes ``pages`` (one a page of the key) for the rest. Mutates.

        Args:
            priority: every node on the way keeps the greatest.
            chunked: a part of a prompt in progress: does not count as a hit.
        """
        end = len(key) // self._page * self._page
        hit = 0 if chunked else 1
        node, at = self._walk(key, namespace, end, (priority, hit))
        have = at // self._page
        if at < end:
            self._clock += 1
            below_root = namespace if node is self.root else b""
            rest = pages[have : end // self._page]
            own = rest if isinstance(rest, list) else list(rest)
            child = Node(node, below_root, key[at:end], own, self._clock, priority)
            child.hits = hit
            self._adopt(node, child)
            self.count += 1
            self.evictable += len(child.pages)
            self._offer(child)
            node = child
        return node, have

    def lock(self, node: Node) -> int:
        """Pin the path to a node; returns by how many pages ``evictable`` changed. Mutates."""
        before = self.evictable
        for passed in path(node):
            if not passed.locks:
                self.evictable -= len(passed.pages)
                self.protected += len(passed.pages)
            passed.locks += 1
        return self.evictable - before

    def unlock(self, node: Node) -> int:
        """Unpin the path to a node; returns by how many pages ``evictable`` changed. Mutates."""
        before = self.evictable
        for passed in path(node):
            passed.locks -= 1
            if not passed.locks:
                self.evictable += len(passed.pages)
                self.protected -= len(passed.pages)
                if not passed.children:
                    self._offer(passed)
        return self.evictable - before

    def warm(self, node: Node) -> None:
        """The path to a node is evicted after all that is not warm. Mutates."""
        for passed in path(node):
            passed.warm += 1

    def cool(self, node: Node) -> None:
        """Take one ``warm`` back. Mutates."""
        for passed in path(node):
            passed.warm -= 1
            if not (passed.warm or passed.locks or passed.children):
                self._push(passed)  # it goes earlier now

    def remove(self, node: Node) -> bool:
        """Take an evictable leaf out; False where it is none. Its pages are the caller's then. Mutates."""
        parent = node.parent
        if parent is None or node.locks or node.children:
            return False
        del parent.children[self._branch(node)]
        node.parent = None
        self.count -= 1
        self.evictable -= len(node.pages)
        if not parent.children:
            self._offer(parent)
        return True

    def cut_off(self) -> None:
        """What is in the tree now is never found again: those who pin it keep it, the rest can be evicted. Mutates."""
        if self.root.children:
            old = Node(None, b"", b"", [], 0)
            old.locks, old.children, self.root.children = 1, self.root.children, LEAF
            for child in old.children.values():
                child.parent = old
            self.cut.append(old)

    def is_lost(self, node: Node) -> bool:
        """Whether the node was cut off, or is gone, or below one that is. Does not mutate."""
        if not self.cut and not self.expired:
            return False
        while node.parent is not None:
            if node.gone:
                return True
            node = node.parent
        return node is not self.root

    def expire(self, now: float) -> list[Node]:
        """Nodes whose time is over are not found again, nor is what is below them; those who pin them keep them.
        Returns them. Mutates."""
        found = self.times.over(now)
        for node in found:
            parent = node.parent
            assert parent is not None
            del parent.children[self._branch(node)]
            self._lost += 1
            node.gone = True
            node.namespace += b"gone" + self._lost.to_bytes(8, "big")  # longer than whatever is looked for
            parent.children[self._branch(node)] = node
        self.expired += found
        self.times.tidy(self.count)
        return found

    def fallen(self) -> list[Node]:
        """Evictable leaves of what was cut off or is gone. Mutates: forgets those that have nothing left."""
        self.cut = [root for root in self.cut if root.children]
        self.expired = [node for node in self.expired if node.parent is not None]
        lost = [*self.expired, *(node for root in (*self.cut, *self.expired) for node in below(root))]
        return [node for node in dict.fromkeys(lost) if not node.locks and not node.children]

    # ---- eviction order

    def victims(self, need: int) -> list[Node]:
        """Whole leaves, in the strategy's order, until ``need`` pages are found; a parent counts once its children
        are among them. Costs a logarithm of the number of leaves for each. The tree itself is not changed."""
        self._enter_named()
        found: list[Node] = []
        gone: set[Node] = set()
        left: dict[Node, int] = {}  # children that are not among the found, of nodes that lost some
        heap, order, named = self._heap, self._order, self._named
        while heap and need > 0:
            entry = heapq.heappop(heap)
            node = entry[2]
            if node.parent is None or node.locks or left.get(node, len(node.children)) or node in gone:
                node.queued = node in gone
                continue
            if order(node) != entry[0]:  # used since it was entered
                self._push(node)
                continue
            named.append(entry)
            found.append(node)
            gone.add(node)
            need -= len(node.pages)
            parent = node.parent
            left[parent] = left.get(parent, len(parent.children)) - 1
            if not left[parent] and not parent.locks:
                self._push(parent)
        return found

    def leaves(self) -> list[Node]:
        """All evictable leaves, first to go first. Does not mutate. Costs time in proportion to the tree."""
        found = [node for node in self.nodes() if not node.locks and not node.children]
        return sorted(found, key=self._order)

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents first, children in the tree's order; those that were cut off come last."""
        for root in (self.root, *self.cut):
            yield from below(root)

    # ---- audit

    def check(self, locks: dict[Node, int]) -> None:
        """Raise ``InvariantViolation`` where pins, sizes or the order of eviction are wrong. Does not mutate."""
        evictable = protected = count = 0
        entered = {entry[2] for entry in (*self._heap, *self._named)}
        for node in self.nodes():
            count += 1
            if node.locks != locks.get(node, 0):
                raise InvariantViolation(f"radix: a node has {node.locks} locks and {locks.get(node, 0)} users")
            if len(node.key) != len(node.pages) * self._page or not node.pages:
                raise InvariantViolation("radix: a node's tokens are not whole pages")
            if node.parent is None or node.parent.children.get(self._branch(node)) is not node:
                raise InvariantViolation("radix: a node is not where its parent has it")
            if node.locks:
                protected += len(node.pages)
            else:
                evictable += len(node.pages)
                if not node.children and node not in entered:
                    raise InvariantViolation("radix: an evictable leaf is missing in the order of eviction")
        if (count, evictable, protected) != (self.count, self.evictable, self.protected):
            raise InvariantViolation(
                f"radix: counts {self.count} nodes, {self.evictable} evictable, {self.protected} protected pages; "
                f"the tree has {count}, {evictable}, {protected}"
            )

    # ---- inside

    def _walk(
        self,
        key: bytes,
        namespace: bytes,
        end: int,
        insert: tuple[int, int] | None,
        known: tuple[Node, int] | None = None,
    ) -> tuple[Node, int]:
        """Follow ``key[:end]`` down (whole pages); returns the node that it ends with, and the bytes covered.

        ``insert`` is the priority and the hit that an insert leaves on every node; a split counts it on the upper part.
        """
        self._clock += 1
        now, page = self._clock, self._page
        node = last = self.root
        at = 0
        if known is not None and known[0].parent is not None:
            node, at = self._resume(known, end)
            last = node
        branch = key[at : at + page] if at else namespace + key[:page]
        while at < end:
            child = node.children.get(branch)
            if child is None:
                break
            child.used = now
            last = child
            stretch = child.key
            upto = at + len(stretch)
            if upto > end or not key.startswith(stretch, at):
                upto = at + self._common(stretch, key, at, min(upto, end))
                child = self._split(child, upto - at)
            if insert is not None:
                child.priority = max(child.priority, insert[0])
                child.hits += insert[1]
            node, at = child, upto
            branch = key[at : at + page]
        if self._falls and not last.locks and not last.children:
            self._push(last)
        return node, at

    def _resume(self, known: tuple[Node, int], end: int) -> tuple[Node, int]:
        """Where the search goes on: the known node, or its nearest one above that lies within ``end``. All of its path
        becomes recent."""
        node, at = known[0], known[1] * self._page
        while at > end:
            at -= len(node.key)
            assert node.parent is not None
            node = node.parent
        for passed in path(node):
            passed.used = self._clock
        return node, at

    def _common(self, stretch: bytes, key: bytes, at: int, upto: int) -> int:
        """Bytes of whole pages (one at least: the branch) that ``stretch`` shares with ``key[at:upto]``."""
        page = self._page
        low, high = 1, (upto - at) // page
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(stretch[low * page : middle * page], at + low * page):
                low = middle
            else:
                high = middle - 1
        return low * page

    def _split(self, node: Node, cut: int) -> Node:
        """Cut a node in two; returns the new upper part. Whoever holds the node keeps meaning the lower part."""
        parent = node.parent
        assert parent is not None
        pages = cut // self._page
        self._clock += 1
        upper = Node(parent, node.namespace, node.key[:cut], node.pages[:pages], self._clock, node.priority)
        upper.locks, upper.hits, upper.warm = node.locks, node.hits, node.warm
        self.times.set(upper, node.until)
        parent.children[self._branch(node)] = upper
        node.parent, node.namespace = upper, b""
        node.key, node.pages = node.key[cut:], node.pages[pages:]
        self._adopt(upper, node)
        self.count += 1
        return upper

    def _branch(self, node: Node) -> bytes:
        """What its parent knows it by: its first page, below the root behind the namespace."""
        return node.namespace + node.key[: self._page]

    def _adopt(self, parent: Node, child: Node) -> None:
        if not parent.children:
            parent.children = {}
        parent.children[self._branch(child)] = child

    def _offer(self, node: Node) -> None:
        """A node may have become an evictable leaf. An entry that it has already is brought up to date when met."""
        if node.locks or (node.queued and not self._falls):
            return
        if len(self._heap) > 2 * self.count + HEAP_SLACK:  # mostly stale: without a shortage nobody meets them
            for _, _, stale in (*self._heap, *self._named):
                stale.queued = False
            self._named.clear()
            leaves = [leaf for leaf in self.nodes() if not leaf.locks and not leaf.children and leaf is not node]
            self._heap = [(self._order(leaf), number, leaf) for number, leaf in enumerate(leaves)]
            self._entries = len(leaves)
            heapq.heapify(self._heap)
            for leaf in leaves:
                leaf.queued = True
        self._push(node)

    def _enter_named(self) -> None:
        """Who was named as a victim and is still an evictable leaf returns to the order."""
        for entry in self._named:
            node = entry[2]
            node.queued = node.parent is not None and not node.locks and not node.children
            if node.queued:
                heapq.heappush(self._heap, entry)
        self._named.clear()

    def _push(self, node: Node) -> None:
        node.queued = True
        self._entries += 1
        heapq.heappush(self._heap, (self._order(node), self._entries, node))
