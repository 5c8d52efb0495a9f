"""The arbiter: puts the hooks' questions for a step (``order``, ``evict``), and holds the answers to the rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.core.hooks import HookBus
from engine.core.pages import PagePool
from engine.core.plan import Candidate, EvictionPool, Why
from engine.core.protocols import KVCache, Match
from engine.core.request import Request
from engine.core.roster import Roster

if TYPE_CHECKING:
    from engine.core.step import Step

ORDER_WINDOW = 4096
NO_MATCH = Match(0, (), 0)


class Tally(Protocol):
    """Who counts evictions."""

    evicted: int


class Arbiter:
    """Asks on behalf of a step. What is looked up once a step is remembered until ``forget_step``."""

    def __init__(self, roster: Roster, kv: KVCache, pool: PagePool, hooks: HookBus) -> None:
        self._roster = roster
        self._kv = kv
        self._pool = pool
        self._hooks = hooks
        self._memo: dict[str, int] = {}
        self._prefixes: dict[str, Match] = {}

    def forget_step(self) -> None:
        """A new step begins. Mutates."""
        self._memo.clear()
        self._prefixes.clear()

    def order(self, step: Step) -> Iterable[Request]:
        """The queue's window after the ``order`` hook; the queue keeps the order."""
        if not self._hooks.orders:
            return self._roster.waiting.walk(ORDER_WINDOW)
        window = self._roster.waiting.window(ORDER_WINDOW)
        if not window:
            return window
        ordered = self._hooks.ask_order(step, window)
        if ordered is None:
            return window
        self._roster.waiting.reorder(len(window), ordered)
        if len(ordered) < len(window):
            chosen = set(ordered)
            for request in window:
                if request not in chosen:
                    step.note(request, Why.ORDER)
            if step.override and not ordered:
                return window
        return ordered

    def cached(self, request: Request) -> int:
        """Memoised length of the cached prefix."""
        known = self._memo.get(request.id)
        if known is None:
            known = self._memo[request.id] = self.match(request).tokens
        return known

    def prefix(self, request: Request) -> Match:
        """Memoised: what the prefix cache has of all the request's tokens, if it may read it."""
        known = self._prefixes.get(request.id)
        if known is None:
            known = self._kv.probe(request) if request.read_cache else NO_MATCH
            self._prefixes[request.id] = known
        return known

    def match(self, request: Request) -> Match:
        """What the prefix cache has of the request, if it may read it. Looked up now."""
        return self._kv.match(request) if request.read_cache else NO_MATCH

    def choose_victim(self, step: Step, needy: Request | None) -> Request | None:
        """Whom to preempt: the hook's first valid answer, else the latest admitted."""
        pool = running_pool(self._roster.running, step, needy)
        for keys in self._hooks.ask_evict(lambda: 1, pool):
            for key in keys:
                if isinstance(key, Request) and step.may_preempt(key):
                    return key
        remaining: Sequence[Candidate] = pool.candidates()
        return remaining[0].request if remaining else None

    def free_up(self, count: int, step: Tally) -> bool:
        """Make ``count`` pages free, evicting idle content; False, with nothing evicted, where they cannot be had.

        Mutates; counts what it evicts in ``step.evicted``.
        """
        if count <= self._pool.num_free:
            return True
        if count > self._kv.available():
            return False
        pool = EvictionPool("cache", self._kv.candidates)

        def missing() -> int:
            return count - self._pool.num_free

        for keys in self._hooks.ask_evict(missing, pool):
            step.evicted += self._kv.drop(keys, missing())
            if missing() <= 0:
                return True
        return False


def running_pool(running: Sequence[Request], step: Step, needy: Request | None) -> EvictionPool:
    """What ``evict`` sees when somebody must be preempted: running requests, the latest admitted first."""

    def candidates() -> list[Candidate]:
        return [
            Candidate(request, len(request.pages), request.arrival_index, request)
            for request in reversed(running)
            if step.may_preempt(request)
        ]

    return EvictionPool("running", candidates, needy)
