"""``early-reject``: who cannot be done in time is told at once, and costs the others nothing.

Source: overload-oriented early rejection of Mooncake (Qin et al., FAST 2025). The work of those that run and of those
that wait before a request, at the measured pace, is when it can start. The hook ``order`` moves the hopeless to the
front, and ``admit`` rejects them there; else they would be found out only when their turn came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from math import inf
from typing import Literal

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Outcome, Reject
from engine.core.protocols import Context, PluginOptions, Policy
from engine.core.request import Request
from engine.core.view import StepView
from engine.plugins.policies._lengths import OutputLengths
from engine.plugins.policies._metadata import deadline
from engine.plugins.policies._pace import Pace

PATIENCE = 8  # steps between two looks at the whole queue
ROOMY = 10  # one part in so many of the pool is available: not pages but slots limit the batch
MAX_PLACES = 1024


class EarlyReject(Policy):
    """Rejects requests whose ``metadata["deadline"]`` (or ``deadline_in``) the backlog puts out of reach.

    Requests without a deadline are never rejected. Attribute ``clock`` is the engine's once it has started.
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
        self.clock: Callable[[], float] = time.monotonic  # until the engine tells its own
        self._pace = Pace()
        self._lengths = OutputLengths(self.options.key)
        self._hopeless: dict[Request, float] = {}  # request -> seconds that it would be late
        self._looked = -PATIENCE

    def start(self, context: Context) -> None:
        """Take the engine's clock, unless another was chosen."""
        if self.clock is time.monotonic:
            self.clock = context.clock

    @hookimpl
    def order(self, step: StepView, waiting: Sequence[Request]) -> Sequence[Request] | None:
        """The hopeless first, to be rejected; no wish where there are none."""
        if self._pace.steps < self.options.warmup or step.index - self._looked < PATIENCE:
            return None
        self._looked = step.index
        now = self.clock()
        ends = self._busy(step, now)
        self._hopeless = {}
        for request in waiting:
            late = self._late(request, ends[0])
            if late > 0:
                self._hopeless[request] = late
            else:
                heapreplace(ends, ends[0] + self._seconds(request))
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

    # ---- inside

    def _busy(self, step: StepView, now: float) -> list[float]:
        """When each place in the batch becomes free, as a heap: of those that run, and the free ones if pages are."""
        running, numbers = step.running, step.kv
        spare = step.slots if numbers.available * ROOMY > numbers.total else 0
        ends = [now] * min(spare, MAX_PLACES) + [now + self._seconds(request) for request in running]
        heapify(ends)
        return ends or [now]

    def _seconds(self, request: Request, *, whole: bool = True) -> float:
        """From its start to its end, or to its first token: the tokens it owes, and a step for each output token."""
        owed = request.num_tokens - request.computed
        steps = self._lengths.predict(request) - request.num_output if whole else 1.0
        return owed * self._pace.token + steps * self._pace.step

    def _late(self, request: Request, start: float) -> float:
        """Seconds by which it would miss its deadline if it started at ``start``."""
        due = deadline(request, self.options.within)
        if due == inf:
            return 0.0
        now = self.clock()
        end = start + self._seconds(request, whole=self.options.of == "completion")
        return now + (end - now) * float(self.options.margin) - due
