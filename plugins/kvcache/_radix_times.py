"""Until when nodes of the radix tree are found, where requests with a ``cache_ttl`` wrote them.

A node's time is never over before that of a node below it: who goes on with a prefix uses it.
"""

from __future__ import annotations

import heapq
from math import inf

from engine.plugins.kvcache._radix_node import Node, path

SLACK = 64


class NodeTimes:
    """Times in seconds on the engine's clock. True while any node may have one."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Node]] = []  # a heap; an entry that is not the node's time any more is stale
        self._entries = 0

    def __bool__(self) -> bool:
        return bool(self._due)

    def set(self, node: Node, until: float) -> None:
        """The node's time. Mutates."""
        node.until = until
        if until < inf:
            self._entries += 1
            heapq.heappush(self._due, (until, self._entries, node))

    def prolong(self, node: Node, until: float) -> None:
        """The path to a node lives until then at least. Mutates."""
        for passed in path(node):
            if passed.until < until:
                self.set(passed, until)

    def over(self, now: float) -> list[Node]:
        """Nodes of the tree whose time is over. It is ``now``. Mutates."""
        self.now = now
        found: list[Node] = []
        while self._due and self._due[0][0] <= now:
            until, _, node = heapq.heappop(self._due)
            if node.until == until and node.parent is not None:
                found.append(node)
        return found

    def tidy(self, nodes: int) -> None:
        """Forget stale entries, where most are. Mutates."""
        if len(self._due) > 2 * nodes + SLACK:
            self._due = [entry for entry in self._due if entry[2].until == entry[0] and entry[2].parent is not None]
            heapq.heapify(self._due)
