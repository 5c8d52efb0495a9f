"""``early-reject``: who cannot be done in time is told at once, and costs the others nothing.

Source: overload-oriented early rejection of Mooncake (Qin et al., FAST 2025). The work of those that run and of those
that wait before a request, over the measured rate, is when it can start. The hook ``order`` moves the hopeless to the
front, and ``admit`` rejects them there; else they would be found out only when their turn came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Outcome, Reject
from engine.core.protocols import PluginOptions, Policy
from engine.core.request import Request
from engine.core.view import StepView
from engine.plugins.policies._lengths import OutputLengths
from engine.plugins.policies._metadata import deadline
from engine.plugins.policies._pace import Pace

PATIENCE = 8  # steps between two looks at the whole queue


class EarlyReject(Policy):
    """Rejects requests whose ``metadata["deadline"]`` (or ``deadline_in``) the backlog puts out of reach.

    Requests without a deadline are never rejected. Attribute ``clock`` is the engine's default clock.
    """

    name = "early-reject"

    class Options(PluginOptions):
        of: Literal["completion", "first-token"] = Field("completion", description="what the deadline is for")
        within: float = Field(0.0, ge=0, description="seconds after arrival for requests that name none (0: none)")
        margin: float = Field(1.0, gt=0, description="factor on the estimate: above 1 rejects sooner")
        warmup: int = Field(16, ge=1, description="steps to measure before anybody is rejected")
        key: str = Field("tenant", description="metadata key whose values have a mean output length of their own")

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self.clock: Callable[[], float] = time.monotonic
        self._pace = Pace()
        self._lengths = OutputLengths(self.options.key)
        self._hopeless: dict[Request, float] = {}  # request -> seconds that it would be late
        self._looked = -PATIENCE

    @hookimpl
    def order(self, step: StepView, waiting: Sequence[Request]) -> Sequence[Request] | None:
        """The hopeless first, to be rejected; no wish where there are none."""
        if self._pace.steps < self.options.warmup or step.index - self._looked < PATIENCE:
            return None
        self._looked = step.index
        now, token = self.clock(), self._pace.token
        work = sum(self._work(request) for request in step.running)
        start = now if step.slots > len(waiting) else now + work * token
        self._hopeless = {}
        for request in waiting:
            late = self._late(request, start)
            if late > 0:
                self._hopeless[request] = late
            else:
                start += self._work(request) * token
        if not self._hopeless:
            return None
        return [*self._hopeless, *(request for request in waiting if request not in self._hopeless)]

    @hookimpl
    def admit(self, request: Request) -> Reject | None:
        """Reject what was found hopeless, and what is so now that its turn has come."""
        if self._pace.steps < self.options.warmup:
            return None
        late = self._hopeless.pop(request, None) or self._late(request, self.clock())
        return Reject(f"its deadline cannot be met: {late:.3g} s late by estimate") if late > 0 else None

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """Measure the pace and the lengths of outputs."""
        self._pace.tick(self.clock(), outcome)
        for request in outcome.finished:
            self._lengths.learn(request)

    def _late(self, request: Request, start: float) -> float:
        """Seconds by which it would miss its deadline if it started at ``start``."""
        due = deadline(request, self.options.within)
        if due == float("inf"):
            return 0.0
        work = request.num_tokens * self._pace.token
        if self.options.of == "completion":
            work += (self._lengths.predict(request) - request.num_output) * self._pace.step
        now = self.clock()
        return now + (start + work - now) * float(self.options.margin) - due

    def _work(self, request: Request) -> float:
        """Tokens that it is still to be computed for: what it owes, and the output to come."""
        owed = request.num_tokens - request.computed
        return owed + self._lengths.predict(request) - request.num_output
