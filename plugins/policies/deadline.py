"""``deadline``: who is due first starts first.

Source: earliest deadline first and least laxity first (Liu and Layland 1973; Dertouzos and Mok 1989). Aging is a
deadline too: everybody is due ``max_wait`` seconds after arrival at the latest, so nobody is overtaken by requests that
came more than that later. Requests that have missed their deadline no longer push others over theirs (EDF's known
weakness under overload): they fall back to aging.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Outcome
from engine.core.protocols import Context, PluginOptions, Policy
from engine.core.request import Request
from engine.core.view import StepView
from engine.plugins.policies._known import Known
from engine.plugins.policies._metadata import deadline
from engine.plugins.policies._pace import Pace


class Deadline(Policy):
    """Orders the queue by ``metadata["deadline"]`` (engine-clock seconds) or ``["deadline_in"]`` (after arrival).

    Attribute ``clock`` is the engine's once it has started; replace it to try other times.
    """

    name = "deadline"
    aliases = ("edf",)

    class Options(PluginOptions):
        mode: Literal["edf", "laxity"] = Field("edf", description="by deadline, or by deadline less the work to do")
        within: float = Field(0.0, ge=0, description="seconds after arrival for requests that name none (0: none)")
        max_wait: float = Field(60.0, gt=0, description="everybody is due so many seconds after arrival at the latest")
        late_last: bool = Field(True, description="a deadline that has passed counts no longer")

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self.clock: Callable[[], float] = time.monotonic  # until the engine tells its own
        self._pace = Pace()
        self._known: Known[float] = Known()  # when each is due

    def start(self, context: Context) -> None:
        """Take the engine's clock, unless another was chosen."""
        if self.clock is time.monotonic:
            self.clock = context.clock

    @hookimpl
    def order(self, step: StepView, waiting: Sequence[Request]) -> Sequence[Request] | None:
        """By what each is due at; arrival decides between equals."""
        if step.slots <= 0:
            return None
        now = self.clock()
        due = self._known.update(waiting, lambda request: self._due(request, now))
        return sorted(waiting, key=due.__getitem__)

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """Measure the pace, which turns work into seconds."""
        self._pace.tick(self.clock(), outcome)

    def _due(self, request: Request, now: float) -> float:
        due = deadline(request, self.options.within)
        start_by = due - self._work(request) if self.options.mode == "laxity" else due
        if self.options.late_last and start_by < now:
            start_by = math.inf
        return min(start_by, request.arrival + float(self.options.max_wait))

    def _work(self, request: Request) -> float:
        """Seconds that the request takes once it starts: its tokens, and a step for each output token that may come."""
        return request.num_tokens * self._pace.token + (request.max_new - request.num_output) * self._pace.step
