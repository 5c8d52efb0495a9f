"""``random-leaf``: evict cached content at random.

Source: Randomized Leaf Token eviction of "Randomization Boosts KV Caching, Learning Balances Query Load" (Wu et al.,
2026): against access in cycles, where the least recently used is always what is needed next, chance keeps a share of
what will be used. Meant for ``kvcache radix``, whose candidates are leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Candidate, EvictionPool
from engine.core.protocols import PluginOptions, Policy
from engine.plugins.policies._ranking import BATCH, Ranking


class RandomLeaf(Policy):
    """Evicts random candidates; with ``sample`` above 1 the least recently used of so many random ones."""

    name = "random-leaf"
    requires = frozenset({"prefix-cache"})

    class Options(PluginOptions):
        seed: int = Field(0, description="makes the choice reproducible")
        sample: int = Field(
            1, ge=1, le=64, description="candidates drawn for each victim; the least recently used goes"
        )

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._random = Random(self.options.seed)
        self._ranking = Ranking()

    @hookimpl
    def evict(self, need: int, pool: EvictionPool) -> Sequence[object] | None:
        """Random candidates of at least ``need`` pages."""
        if pool.kind != "cache":
            return None
        return self._ranking.take(need, pool, lambda candidates: self._draw(candidates, max(need, BATCH)))

    def _draw(self, candidates: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        left: list[Candidate] = list(candidates)
        drawn: list[Candidate] = []
        while left and len(drawn) < count:
            places = [self._random.randrange(len(left)) for _ in range(self.options.sample)]
            place = min(places, key=lambda at: left[at].last_used)
            left[place], left[-1] = left[-1], left[place]
            drawn.append(left.pop())
        return drawn
