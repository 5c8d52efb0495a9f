"""A node of the radix tree, the way up from it, and the orders in which leaves are evicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf
from typing import Any, Final

from engine.core.protocols import Outlined

NEWEST = 12  # children of a node that an outline shows


class Node:
    """A stretch of tokens with its pages. ``locks`` counts the pins whose path goes through it."""

    __slots__ = (
        "children",
        "created",
        "gone",
        "hits",
        "key",
        "locks",
        "namespace",
        "pages",
        "parent",
        "priority",
        "queued",
        "until",
        "used",
        "warm",
    )

    def __init__(
        self, parent: Node | None, namespace: bytes, key: bytes, pages: list[int], now: int, priority: int = 0
    ) -> None:
        self.parent = parent
        self.namespace = namespace  # of nodes right below the root, else empty
        self.key = key
        self.pages = pages
        self.children: dict[bytes, Node] = LEAF
        self.locks = 0
        self.hits = 0  # inserts that went through it
        self.priority = priority  # the greatest of the inserts that went through it
        self.created = now
        self.used = now
        self.warm = 0  # sessions whose path goes through it: with any it goes after all without
        self.queued = False  # has an entry in the order of eviction
        self.until = inf  # when its time is over: see ``_radix_times``
        self.gone = False  # it is: nobody finds it or what is below it


LEAF: Final[dict[bytes, Node]] = {}
"""The children of a node without any: shared, never written."""

STRATEGIES: Final[dict[str, Callable[[Node], Any]]] = {
    "lru": lambda node: node.used,
    "mru": lambda node: -node.used,
    "fifo": lambda node: node.created,
    "filo": lambda node: -node.created,
    "lfu": lambda node: (node.hits, node.used),
    "slru": lambda node: (node.hits >= 2, node.used),
    "priority": lambda node: (node.priority, node.used),
}
"""Eviction strategies: the key of a leaf; the smallest goes first."""


def path(node: Node) -> Iterator[Node]:
    """From a node up to, not including, the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def below(root: Node, *, found: bool = False) -> Iterator[Node]:
    """All nodes below this one, parents first, children in their order; ``found``: those alone that are not gone."""
    stack = list(reversed(root.children.values()))
    while stack:
        node = stack.pop()
        if found and node.gone:
            continue
        yield node
        stack.extend(reversed(node.children.values()))


def outline(root: Node, most: int, token_bytes: int) -> list[Outlined]:
    """At most so many nodes below this one, level by level, of each its newest children. A key has so many bytes a
    token."""
    found: list[Outlined] = []
    level: deque[tuple[Node, int]] = deque([(root, -1)])
    while level:
        node, place = level.popleft()
        for child in islice(reversed(node.children.values()), min(NEWEST, most - len(found))):
            level.append((child, len(found)))
            tokens, pages = len(child.key) // token_bytes, len(child.pages)
            found.append(Outlined(place, tokens, pages, child.locks, len(child.children), child.used))
    return found
