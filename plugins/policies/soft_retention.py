"""``soft-retention``: prefixes that requests mark stay cached longer, within a budget, and never at anybody's cost.

Source: the retention of KV blocks by priority and duration in TensorRT-LLM, made soft: marks only order the eviction.
Where nothing unmarked is left the marked go too, the least important first, so a mark can never block admission.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Candidate, EvictionPool, Outcome
from engine.core.protocols import Context, PluginOptions, Policy
from engine.core.request import Request
from engine.plugins.policies._metadata import number
from engine.plugins.policies._ranking import Ranking, pages_of

UNMARKED = (0.0, 0.0)


class SoftRetention(Policy):
    """Keeps prompts of requests with ``metadata["retain"]`` (priority above 0) for ``["retain_ttl"]`` seconds.

    Marks are set when the request ends. Attribute ``clock`` measures the ttl.
    """

    name = "soft-retention"
    requires = frozenset({"prefix-cache"})

    class Options(PluginOptions):
        budget: float = Field(0.25, ge=0, le=1, description="most of the pool that may be marked, as a share")
        ttl: float = Field(60.0, gt=0, description="seconds, for requests that do not say")
        max_ttl: float = Field(3600.0, gt=0, description="most seconds that a request may ask for")

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self.clock: Callable[[], float] = time.monotonic  # until the engine tells its own
        self.marks: dict[int, tuple[float, float]] = {}  # page -> (priority, when it expires)
        self._ranking = Ranking()
        self._most = 0

    def start(self, context: Context) -> None:
        """Learn the size of the pool, and the clock, unless another was chosen."""
        if self.clock is time.monotonic:
            self.clock = context.clock
        self._most = int(context.limits.num_pages * float(self.options.budget))

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """Mark the prompts of marked requests that ended; pages that others filled anew lose their marks."""
        size = outcome.plan.page_size
        for request in outcome.finished:
            priority = number(request, "retain") or 0.0
            if self.marks:
                for page in request.pages[request.cached_tokens // size :]:
                    self.marks.pop(page, None)
            if priority > 0:
                self._mark(request, priority, size)

    @hookimpl
    def evict(self, need: int, pool: EvictionPool) -> Sequence[object] | None:
        """The unmarked in the default's order, then the marked, the least important and the first to expire first."""
        if pool.kind != "cache" or not self.marks:
            return None
        now = self.clock()
        return self._ranking.take(need, pool, lambda candidates: self._choose(candidates, need, now))

    def _choose(self, candidates: Sequence[Candidate], need: int, now: float) -> Sequence[Candidate]:
        holds = {candidate.key: self._hold(candidate, now) for candidate in candidates}
        free = [candidate for candidate in candidates if holds[candidate.key] == UNMARKED]
        missing = need - sum(candidate.pages for candidate in free)
        for candidate in sorted(candidates, key=lambda c: holds[c.key]) if missing > 0 else ():
            if missing > 0 and holds[candidate.key] != UNMARKED:
                free.append(candidate)
                missing -= candidate.pages
        return free

    def _mark(self, request: Request, priority: float, size: int) -> None:
        now = self.clock()
        wanted = number(request, "retain_ttl")
        ttl = min(wanted if wanted is not None and wanted > 0 else self.options.ttl, self.options.max_ttl)
        pages = request.pages[: request.num_prompt // size]
        if len(self.marks) + len(pages) > self._most:
            self._make_room(len(pages), priority, now)
        self._ranking.forget()
        for page in pages:
            if page in self.marks or len(self.marks) < self._most:
                self.marks[page] = max(self.marks.get(page, UNMARKED), (priority, now + ttl))

    def _make_room(self, count: int, priority: float, now: float) -> None:
        """Forget marks that expired, then the least important below ``priority``, until ``count`` more fit."""
        self.marks = {page: mark for page, mark in self.marks.items() if mark[1] > now}
        over = len(self.marks) + count - self._most
        for page in sorted(self.marks, key=lambda page: self.marks[page])[: max(0, over)]:
            if self.marks[page][0] < priority:
                del self.marks[page]

    def _hold(self, candidate: Candidate, now: float) -> tuple[float, float]:
        """How firmly it is kept: the most important of its marks that have not expired."""
        marks = [self.marks.get(page, UNMARKED) for page in pages_of(candidate.key)]
        return max((mark for mark in marks if mark[1] > now), default=UNMARKED)
