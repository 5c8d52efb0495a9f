"""``least-recompute``: when memory is short, preempt whose loss costs least.

Source: minimum-waste preemption of InferCept (Abhyankar et al., ICML 2024): what a victim loses is what it must compute
again. Its prefix came from the cache and probably comes from there again, so only what it computed itself counts,
weighed with the pages that it gives back.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Candidate, EvictionPool
from engine.core.protocols import Context, PluginOptions, Policy


class LeastRecompute(Policy):
    """Orders victims by computed tokens that were not cached, over the pages freed to the power of ``page_weight``."""

    name = "least-recompute"

    class Options(PluginOptions):
        page_weight: float = Field(0.25, ge=0, le=1, description="0: only the loss counts; 1: the loss a page")
        max_preemptions: int = Field(3, ge=1, description="who was preempted so often is the last choice")

    def start(self, context: Context) -> None:
        """Learn the page size."""
        self._page_size = context.limits.page_size

    @hookimpl
    def evict(self, need: int, pool: EvictionPool) -> Sequence[object] | None:
        """Who frees enough and loses least; the last admitted between equals."""
        if pool.kind != "running":
            return None
        return [candidate.key for candidate in sorted(pool.candidates(), key=lambda c: self._loss(c, need))]

    def _loss(self, candidate: Candidate, need: int) -> tuple[bool, bool, float]:
        request = candidate.request
        if request is None:
            return True, True, 0.0
        shared = min(request.cached_tokens, request.computed) if not request.preemptions else 0
        freed = candidate.pages - shared // self._page_size
        loss = (request.computed - shared) / max(1, freed) ** float(self.options.page_weight)
        return request.preemptions >= self.options.max_preemptions, freed < need, loss
