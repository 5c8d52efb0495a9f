"""The orders of the waiting queue, and in-batch prefix caching. Source: SGLang's schedule policies.

All sorts are stable over the queue's present order, which the queue keeps: equals stay as they stood, not as they came.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from engine.core.protocols import Match, PrefixNode
from engine.core.request import Request
from engine.core.step import Step

PolicyName = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key"]

LPM_QUEUE_LIMIT = 128  # above so many waiting, matching all of them costs more than it brings
IN_BATCH_CHECK = 32  # who finds more than this cached waits for no sibling
IN_BATCH_SHARED = 32  # tokens that a request must share with one before it to wait for that one's prefix
CACHE_AWARE = ("lpm", "dfs-weight")


class QueueOrder:
    """Orders the waiting requests by one policy.

    * ``fcfs``: as they stand.
    * ``lpm``: longest cached prefix first; as they stand while more than 128 wait.
    * ``dfs-weight``: the cache's tree depth first, subtrees with the most waiting requests first. A cache without a
      tree: as ``lpm``.
    * ``lof``: longest output first. ``random``: shuffled.
    * ``routing-key``: those whose ``metadata["routing_key"]`` most of the running share first, the rest by key.

    The cache-aware ones are ``fcfs`` where the cache remembers nothing. They postpone siblings: of several requests
    that share a prefix which is not cached yet, the first computes it, and the others sort behind everybody.

    Args:
        policy: the name.
        priorities: sort by the requests' priority first.
        max_overtakings: a request that so many later ones have overtaken goes before all others (looked at once a
            pass); ``None``: never.
        seed: of ``random``.

    Attributes:
        active: what the last pass came down to.
        postponed: the requests that the last pass postponed.
    """

    def __init__(
        self, policy: PolicyName, *, priorities: bool = False, max_overtakings: int | None = None, seed: int = 0
    ) -> None:
        self.active: PolicyName = policy
        self.postponed: set[Request] = set()
        self._policy = policy
        self._priorities = priorities
        self._random = random.Random(seed)
        self._max_overtakings = max_overtakings
        self._overtaken: dict[Request, int] = {}  # of those that waited in the last pass; kept if there is a limit

    def order(self, step: Step, waiting: Sequence[Request]) -> Sequence[Request] | None:
        """The waiting requests in order; ``None``: as they stand. Looks prefixes up; that touches recency only."""
        self.postponed.clear()
        self.active = policy = self._effective(step, waiting)
        ordered = None if policy == "fcfs" else self._by_policy(policy, step, waiting)
        if self._priorities:
            ordered = sorted(ordered or waiting, key=lambda request: request.priority)
        if self._max_overtakings is not None:
            return self._starving_first(ordered or waiting, self._max_overtakings)
        return ordered

    def started(self, requests: Sequence[Request]) -> None:
        """These were admitted: whoever entered the queue before one of them was overtaken. Mutates."""
        if self._max_overtakings is None:
            return
        for started in requests:
            self._overtaken.pop(started, None)
            for waiting in self._overtaken:
                self._overtaken[waiting] += waiting.entry_index < started.entry_index

    def _starving_first(self, ordered: Sequence[Request], limit: int) -> Sequence[Request]:
        self._overtaken = {request: self._overtaken.get(request, 0) for request in ordered}
        starving = [request for request, overtakings in self._overtaken.items() if overtakings >= limit]
        starving.sort(key=lambda request: request.entry_index)
        return [*starving, *(request for request in ordered if self._overtaken[request] < limit)]

    def _effective(self, step: Step, waiting: Sequence[Request]) -> PolicyName:
        policy = self._policy
        if policy in CACHE_AWARE and not step.caching:
            return "fcfs"
        if policy == "lpm" and len(waiting) > LPM_QUEUE_LIMIT:
            return "fcfs"
        return policy

    def _by_policy(self, policy: PolicyName, step: Step, waiting: Sequence[Request]) -> Sequence[Request] | None:
        if policy == "lof":
            return sorted(waiting, key=lambda request: -request.max_new)
        if policy == "random":
            return self._random.sample(list(waiting), len(waiting))
        if policy == "routing-key":
            return by_routing_key(step.running, waiting)
        prefixes = [step.prefix(request) for request in waiting]
        self.postponed.update(siblings(waiting, prefixes))
        if policy == "dfs-weight" and any(prefix.handle is not None for prefix in prefixes):
            return depth_first(waiting, prefixes)
        worth: dict[Request, int] = {
            request: min(prefix.tokens, request.num_tokens - 1)
            for request, prefix in zip(waiting, prefixes, strict=True)
        }
        worth.update(dict.fromkeys(self.postponed, -1))
        return sorted(waiting, key=lambda request: -worth[request])


def siblings(waiting: Sequence[Request], prefixes: Sequence[Match]) -> list[Request]:
    """Those who share the first 32 tokens with one before them, as long as hardly anything of them is cached.

    The first of each family is to fill the cache for the others. Two sequences share 32 tokens exactly if their heads
    of 32 tokens are equal, so a set of heads is all that is needed.
    """
    heads: set[tuple[bytes, bytes]] = set()
    found = []
    for request, prefix in zip(waiting, prefixes, strict=True):
        if prefix.tokens > IN_BATCH_CHECK or request.num_tokens < IN_BATCH_SHARED:
            continue
        head = (request.namespace, request.packed_tokens(0, IN_BATCH_SHARED))
        if head in heads:
            found.append(request)
        heads.add(head)
    return found


def depth_first(waiting: Sequence[Request], prefixes: Sequence[Match]) -> list[Request]:
    """By the tree, depth first: heavy subtrees (most waiting below) first, ties as the tree has its children.

    Requests that end deeper come before those of the nodes above; those without any prefix come last. Only the paths
    to matched nodes are visited.
    """
    at: dict[PrefixNode, list[Request]] = {}
    weight: Counter[PrefixNode] = Counter()
    above: set[PrefixNode] = set()  # nodes with waiting requests below
    root: PrefixNode | None = None
    strangers: list[Request] = []  # they were told not to read the cache
    for request, prefix in zip(waiting, prefixes, strict=True):
        (strangers if prefix.handle is None else at.setdefault(prefix.handle, [])).append(request)
    for leaf, requests in at.items():
        node = leaf
        while (parent := node.parent) is not None:
            above.add(parent)
            weight[node] += len(requests)
            node = parent
        root = node
    assert root is not None
    ordered: list[Request] = []
    stack: list[tuple[PrefixNode, bool]] = [(root, False)]
    while stack:
        node, visited = stack.pop()
        if visited or node not in above:
            ordered += at.get(node, ())
            continue
        stack.append((node, True))
        heavy = [child for child in node.children.values() if child in weight]
        heavy.sort(key=lambda child: -weight[child])
        stack.extend((child, False) for child in reversed(heavy))
    return [*ordered, *strangers]


def by_routing_key(running: Sequence[Request], waiting: Sequence[Request]) -> list[Request] | None:
    """Keys that run now first, the most frequent of them first; then the rest by key. ``None`` if nothing runs."""
    if not running:
        return None
    shares = Counter(routing_key(request) for request in running)

    def rank(request: Request) -> tuple[bool, int, str]:
        key = routing_key(request)
        share = shares[key] if key else 0
        return not share, -share, key

    return sorted(waiting, key=rank)


def routing_key(request: Request) -> str:
    """The request's routing key; empty where it has none."""
    key = request.metadata.get("routing_key")
    return "" if key is None else str(key)
