"""Conversations: the prefix that a session's last request left behind is evicted after all that belongs to none.

A preference, never a reservation: its pages stay evictable, so a session cannot keep anybody out. Source: SGLang's
sessions, which keep a conversation's prefix for its next turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from engine.plugins.kvcache._radix_node import Node
from engine.plugins.kvcache._radix_tree import RadixTree


class Sessions:
    """Keeps the paths of the most recent sessions warm.

    Args:
        tree: whose nodes are marked.
        most: sessions kept; with one more, the one that was silent for longest is let go.
        ttl: seconds after which a silent session is let go.
        clock: seconds.
    """

    def __init__(self, tree: RadixTree, most: int, ttl: float, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._most = most
        self._ttl = ttl
        self._clock = clock
        self._last: OrderedDict[str, tuple[Node, float]] = (
            OrderedDict()
        )  # session -> end of its path, when; oldest first
        self._ends: dict[Node, set[str]] = {}

    def __len__(self) -> int:
        return len(self._last)

    def keep(self, session: str, node: Node) -> None:
        """A request of the session ended at this node: its path is warm instead of the one before. Mutates."""
        self.forget(session)
        self._tree.warm(node)
        self._last[session] = (node, self._clock())
        self._ends.setdefault(node, set()).add(session)
        self.expire()

    def expire(self) -> None:
        """Let go of sessions that were silent for too long, and of the oldest above the limit. Mutates."""
        before = self._clock() - self._ttl
        while self._last:
            session, (_, when) = next(iter(self._last.items()))
            if when >= before and len(self._last) <= self._most:
                break
            self.forget(session)

    def forget(self, session: str) -> None:
        """The session is over. Unknown ones are fine. Mutates."""
        if session not in self._last:
            return
        node, _ = self._last.pop(session)
        self._leave(node, session)
        self._tree.cool(node)

    def clear(self) -> None:
        """Every session is over. Mutates."""
        for session in list(self._last):
            self.forget(session)

    def evicted(self, node: Node, parent: Node) -> None:
        """A leaf is gone from below ``parent``: sessions that ended there end a node earlier. Mutates."""
        for session in self._ends.pop(node, ()):
            self._last[session] = (parent, self._last[session][1])
            self._ends.setdefault(parent, set()).add(session)

    def _leave(self, node: Node, session: str) -> None:
        ends = self._ends[node]
        ends.discard(session)
        if not ends:
            del self._ends[node]
