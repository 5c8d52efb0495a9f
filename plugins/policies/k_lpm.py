"""``k-lpm``: the longest cached prefix first, and each k-th time the oldest.

Source: k-LPM of "LLM Query Scheduling with Prefix Reuse and Latency Constraints" (Dexter et al. 2025): k = 1 is first
come, first served; k without end is the longest-prefix-match order of SGLang. A request with e older ones before it
starts at the latest at the k (e + 1)-th start.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Outcome
from engine.core.protocols import PluginOptions, Policy
from engine.core.request import Request
from engine.core.view import StepView
from engine.plugins.policies._interleave import interleave
from engine.plugins.policies._known import Known


class KLPM(Policy):
    """Orders the oldest requests of the queue by cached prefix, interleaved with order of arrival."""

    name = "k-lpm"
    requires = frozenset({"prefix-cache"})

    class Options(PluginOptions):
        k: int = Field(4, ge=1, description="each k-th start is the oldest request")
        window: int = Field(128, ge=1, description="how many of the oldest are looked up in the cache")

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._starts = 0
        self._ages: Known[None] = Known(fixed=True)
        self._cached: Known[int] = Known()

    @hookimpl
    def order(self, step: StepView, waiting: Sequence[Request]) -> Sequence[Request] | None:
        """Longest prefix first within the window; the rest behind it, by arrival."""
        if step.slots <= 0:
            return None
        elders = self._ages.update(waiting, lambda request: None)
        cached = self._cached.update(list(islice(elders, self.options.window)), step.cached)
        longest = sorted(cached, key=cached.__getitem__, reverse=True)
        k, starts = self.options.k, self._starts
        ordered = interleave(longest, cached, lambda place, elder: (starts + place) % k == k - 1, step.slots)
        return [*ordered, *islice(elders, len(cached), None)]

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """Count starts."""
        self._starts += len(outcome.plan.admitted)
