"""What is measured of steps where they run: how long they take, what they hold, and how long requests had waited."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy as copy
from typing import TYPE_CHECKING

from engine.core.explain import explain
from engine.core.histograms import SECONDS, TOKENS, Histogram
from engine.core.plan import Why
from engine.core.serve.messages import Started

if TYPE_CHECKING:
    from engine.core.plan import Plan
    from engine.core.request import Request
    from engine.core.serve.host import Core

AT_ONCE = "none"  # the reason of a request that started in the first step that could see it
STEP_SECONDS = (0.001, 0.0025, *SECONDS)


class Meter:
    """Looks at a core after each of its steps. Its cost is in proportion to the requests that a step starts, and to
    those that are parked.

    Attributes:
        steps: seconds of the steps that computed something.
        tokens: tokens that they computed.
        advanced: how many steps brought work forward: computed tokens, or an end.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.steps = Histogram.of(STEP_SECONDS)
        self.tokens = Histogram.of(TOKENS)
        self.advanced = 0
        self._mark = self._progress()
        self._before: Plan | None = None
        self._planned_at = 0.0
        self._parked: frozenset[str] = frozenset()

    def stepped(self, seconds: float) -> list[Started]:
        """A step has ended that took so long. Returns the requests that it started for the first time. Mutates."""
        core, plan = self._core, self._core.last_plan
        if (mark := self._progress()) != self._mark or core.settled:  # settled: only KV goes out, nobody waits for it
            self._mark, self.advanced = mark, self.advanced + 1
        started: list[Started] = []
        if plan is not None and plan is not self._before:
            if plan:
                self.steps.add(seconds)
                self.tokens.add(plan.total_tokens)
            for request in plan.admitted:
                if request.preemptions == 0 and request.started is not None:
                    started.append(Started(request.id, request.started - request.arrival, self._reason(request)))
        self._before, self._planned_at = plan, core.now() - seconds
        self._parked = frozenset(core.parked)
        return started

    def histograms(self) -> dict[str, Histogram]:
        """Copies, by name."""
        return {"step_seconds": copy(self.steps), "batch_tokens": copy(self.tokens)}

    def _reason(self, request: Request) -> str:
        """What it waited for in the step before the one that started it."""
        if request.id in self._parked:
            return Why.PARKED.value
        before = self._before
        if before is None or request.arrival > self._planned_at:
            return AT_ONCE
        return before.waits.get(request.id, (before.otherwise, ""))[0].value

    def _progress(self) -> int:
        counters = self._core.counters
        return counters.computed_tokens + sum(counters.finished.values())


def waiting_reasons(core: Core) -> dict[str, int]:
    """How many requests wait for what, as of the last plan. Costs time in proportion to the queue."""
    plan, budget = core.last_plan, core.limits.max_batch_tokens
    found: Counter[str] = Counter()
    for request in (*core.waiting, *core.parked.values()):
        why = explain(request, plan, budget)
        found[(why[0] if why is not None else Why.NOT_ASKED).value] += 1
    return dict(found)
