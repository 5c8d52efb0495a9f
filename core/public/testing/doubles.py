"""Plugins that stand in for others: one that does nothing, and a cache and a connector that fail on purpose."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from engine.core.cache_watch import CacheWatcher
from engine.core.errors import OutOfPages
from engine.core.hookspecs import hookimpl
from engine.core.plan import Candidate, EvictionPool, KVNumbers, Outcome, Transfer, TransferEvent
from engine.core.protocols import Connector, Context, KVCache, Match, Policy, Publication
from engine.core.request import Request

NOTHING = Match(0, (), 0)


class DoNothing(Policy):
    """Is asked everything that a policy can be, and has no opinion: what a plugin costs and must not change."""

    name = "do-nothing"

    @hookimpl
    def order(self, waiting: Sequence[Request]) -> None:
        """As it stands."""

    @hookimpl
    def admit(self, request: Request) -> None:
        """No objection."""

    @hookimpl
    def evict(self, need: int, pool: EvictionPool) -> None:
        """Whatever the next one says."""

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """No books."""


class FaultyCache(KVCache):
    """A KV cache around another that misbehaves within the rules: it misses, forgets, and fails when told to.

    Whatever it does is allowed, so a scheduler must live with it: a prefix that was there a step ago is gone, idle
    content is evicted although nobody asked. Only ``fail_next`` breaks a rule: the engine must stop with a diagnosis.

    Args:
        inner: the cache that does the work.
        seed: of the misbehaviour.
        miss: how often ``match`` and ``probe`` find nothing, 0 … 1.
        forget: how often idle content is dropped before a look-up, 0 … 1.

    Attributes:
        fail_next: how many coming calls of ``take`` raise ``OutOfPages`` although there are pages.
        misses: look-ups that found nothing on purpose.
        forgotten: pages that were evicted on purpose.
    """

    name = "faulty"

    def __init__(self, inner: KVCache, *, seed: int = 0, miss: float = 0.2, forget: float = 0.1) -> None:
        super().__init__()
        self.inner = inner
        self.miss, self.forget = miss, forget
        self.fail_next = self.misses = self.forgotten = 0
        self._rng = random.Random(seed)
        self.publish_when = inner.publish_when  # type: ignore[misc]  # the core reads it off the instance

    def start(self, context: Context) -> None:
        """Start the inner cache."""
        self._page_size = context.pool.page_size
        self.inner.start(context)
        self.caching = self.inner.caching

    def close(self) -> None:
        """Close the inner cache."""
        self.inner.close()

    def match(self, request: Request) -> Match:
        """What the inner cache finds, or nothing."""
        return NOTHING if self._misbehaves() else self.inner.match(request)

    def probe(self, request: Request) -> Match:
        """What the inner cache finds, or nothing."""
        return NOTHING if self._misbehaves() else self.inner.probe(request)

    def take(self, request: Request, count: int) -> list[int]:
        """As the inner cache; raises ``OutOfPages`` while ``fail_next`` is above 0."""
        if self.fail_next > 0:
            self.fail_next -= 1
            raise OutOfPages("a scripted failure: there are pages, and none is given")
        return self.inner.take(request, count)

    def take_each(self, requests: Sequence[Request]) -> list[int]:
        """As the inner cache; raises ``OutOfPages`` while ``fail_next`` is above 0."""
        if self.fail_next > 0:
            self.fail_next -= 1
            raise OutOfPages("a scripted failure: there are pages, and none is given")
        return self.inner.take_each(requests)

    def adopt(self, request: Request, match: Match) -> list[int]:
        """As the inner cache."""
        return self.inner.adopt(request, match)

    def publish(self, request: Request, upto: int) -> Publication:
        """As the inner cache."""
        return self.inner.publish(request, upto)

    def unpublish(self, keys: Sequence[object]) -> None:
        """As the inner cache."""
        self.inner.unpublish(keys)

    def release(self, request: Request, keep: int) -> None:
        """As the inner cache."""
        self.inner.release(request, keep)

    def drop(self, keys: Iterable[object], need: int | None = None) -> int:
        """As the inner cache."""
        return self.inner.drop(keys, need)

    def victims(self, need: int) -> Sequence[object]:
        """As the inner cache."""
        return self.inner.victims(need)

    def candidates(self) -> Sequence[Candidate]:
        """As the inner cache."""
        return self.inner.candidates()

    def numbers(self) -> KVNumbers:
        """As the inner cache."""
        return self.inner.numbers()

    def reset(self) -> None:
        """As the inner cache."""
        self.inner.reset()

    def watch(self, watcher: CacheWatcher) -> bool:
        """As the inner cache."""
        return self.inner.watch(watcher)

    def contents(self) -> dict[int, bytes] | None:
        """As the inner cache."""
        return self.inner.contents()

    def peek(self, namespace: bytes, packed: bytes) -> int | None:
        """As the inner cache."""
        return self.inner.peek(namespace, packed)

    def check(self, requests: Iterable[Request]) -> None:
        """As the inner cache."""
        self.inner.check(requests)

    def short(self, request: Request, upto: int) -> int:
        """As the inner cache."""
        return self.inner.short(request, upto)

    def _misbehaves(self) -> bool:
        if self._rng.random() < self.forget:
            keys = [candidate.key for candidate in self.inner.candidates()]
            self._rng.shuffle(keys)
            self.forgotten += self.inner.drop(keys[: self._rng.randrange(len(keys) + 1)])
        missed = self._rng.random() < self.miss
        self.misses += missed
        return missed


class FaultyConnector(Connector):
    """A connector over a bad line: transfers end late, in any order, fail, are answered twice or by another name.

    Args:
        seed: of the misbehaviour.
        patience: a transfer is open for so many calls at most.
        deaf: no transfer is ever answered (its pages stay fenced until the engine ends).

    Attributes:
        opened: every transfer asked for, in order.
    """

    name = "faulty"

    def __init__(self, *, seed: int = 0, patience: int = 5, deaf: bool = False) -> None:
        super().__init__()
        self.opened: list[Transfer] = []
        self.deaf = deaf
        self._patience = patience
        self._rng = random.Random(seed)
        self._open: dict[str, int] = {}

    @hookimpl
    def transfer_kv(self, transfers: Sequence[Transfer]) -> Sequence[TransferEvent]:
        """Some events of some transfers, strays and repetitions among them."""
        rng = self._rng
        self.opened += transfers
        if self.deaf:
            return []
        self._open.update({wish.id: rng.randrange(self._patience + 1) for wish in transfers})
        events: list[TransferEvent] = []
        for name, left in list(self._open.items()):
            self._open[name] = left - 1
            if left > 0:
                continue
            del self._open[name]
            failed = rng.random() < 0.3
            event = TransferEvent(name, "failed" if failed else "done", reason="a bad line" if failed else "")
            events += [event] * rng.choice((1, 1, 1, 2))
        if rng.random() < 0.2:
            events.append(TransferEvent("nobody-asked", "done"))
        rng.shuffle(events)
        return events
