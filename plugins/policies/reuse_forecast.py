"""``reuse-forecast``: evict what is least likely to be used again soon.

Source: workload-aware eviction of "KVCache Cache in the Wild" (Wang et al., USENIX ATC 2025): requests of one category
reuse prefixes with a likelihood and after times of their own. Both are learned: how often what a category leaves behind
is hit, and after how many steps. What is unused for long against that is forecast to stay so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Candidate, EvictionPool, Outcome
from engine.core.protocols import PluginOptions, Policy
from engine.core.request import Request
from engine.plugins.policies._metadata import label
from engine.plugins.policies._ranking import Ranking, pages_of

MAX_CATEGORIES = 1024


class _Category:
    """What became of the prefixes that requests of one category left behind."""

    __slots__ = ("hits", "interval", "left")

    def __init__(self) -> None:
        self.left = 2.0  # prefixes left behind; it starts with an even chance
        self.hits = 1.0  # those that were used again
        self.interval = 0.0  # mean steps until then

    def hit(self, interval: float) -> None:
        self.hits += 1
        self.interval += (interval - self.interval) / min(self.hits - 1, 20)

    def chance(self, age: float) -> float:
        """That it is used again soon, after ``age`` steps unused (exponential intervals)."""
        mean = max(1.0, self.interval) if self.hits > 1 else max(1.0, age)
        return min(1.0, self.hits / self.left) / mean * math.exp(-age / mean)


class ReuseForecast(Policy):
    """Evicts by forecast reuse of the category that last used each page."""

    name = "reuse-forecast"
    requires = frozenset({"prefix-cache"})

    class Options(PluginOptions):
        key: str = Field("category", description="metadata key that names the category of a request")

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._categories: dict[str, _Category] = {}
        self._tags: dict[int, tuple[str, int]] = {}  # page -> category and step of its last use
        self._step = 0
        self._ranking = Ranking()

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """Learn from hits when requests start; note who leaves which pages behind when they end."""
        plan = outcome.plan
        self._step = plan.index
        for request in plan.admitted:
            hit = request.cached_tokens // plan.page_size
            if 0 < hit <= len(request.pages) and not request.preemptions:
                category, since = self._tags.get(request.pages[hit - 1], ("", plan.index))
                if since < plan.index:
                    self._category(category).hit(plan.index - since)
        for request in outcome.finished:
            self._leave(request)

    @hookimpl
    def evict(self, need: int, pool: EvictionPool) -> Sequence[object] | None:
        """The least likely reuse first."""
        if pool.kind != "cache" or not self._tags:
            return None
        return self._ranking.take(need, pool, lambda candidates: sorted(candidates, key=self._chance))

    def _leave(self, request: Request) -> None:
        category = label(request, self.options.key)
        self._category(category).left += 1
        self._tags.update(dict.fromkeys(request.pages, (category, self._step)))

    def _chance(self, candidate: Candidate) -> float:
        pages = pages_of(candidate.key)
        tag = self._tags.get(pages[-1]) if pages else None
        if tag is None:
            return 0.0
        return self._category(tag[0]).chance(self._step - tag[1])

    def _category(self, name: str) -> _Category:
        if name not in self._categories:
            if len(self._categories) >= MAX_CATEGORIES:
                del self._categories[next(iter(self._categories))]
            self._categories[name] = _Category()
        return self._categories[name]
