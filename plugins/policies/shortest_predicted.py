"""``shortest-predicted``: the least predicted work first, nobody overtaken without end.

Source: shortest-job-first on predicted output lengths, as in SSJF (Qiu et al. 2024) and learning to rank (Fu et al.,
NeurIPS 2024), whose starvation guard this one makes a bound: when a request is first seen it gets a ticket, the number
of starts after which it is due. At most ``max_overtaken`` starts later than first come, first served it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Outcome
from engine.core.protocols import PluginOptions, Policy
from engine.core.request import Request
from engine.core.view import StepView
from engine.plugins.policies._interleave import interleave
from engine.plugins.policies._known import Known
from engine.plugins.policies._lengths import OutputLengths


class ShortestPredicted(Policy):
    """Orders by ``metadata["predicted_tokens"]``, else by the mean output of the request's group.

    Preempted requests resume first. The bound holds over the window that the core shows (4096 requests).
    """

    name = "shortest-predicted"
    aliases = ("sjf",)

    class Options(PluginOptions):
        key: str = Field("tenant", description="metadata key whose values have a mean of their own")
        prompt_weight: float = Field(0.05, ge=0, description="what a prompt token counts beside an output token")
        max_overtaken: int = Field(
            64, ge=0, description="most starts that a request waits more than in order of arrival"
        )

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._lengths = OutputLengths(self.options.key)
        self._starts = 0
        self._tickets: dict[Request, int] = {}
        self._known: Known[float] = Known()

    @hookimpl
    def order(self, step: StepView, waiting: Sequence[Request]) -> Sequence[Request] | None:
        """Least work first, but who is due at a place takes it."""
        if step.slots <= 0:
            return None
        work = self._known.update(waiting, self._work)  # oldest first
        self._hand_out(work)
        tickets, starts = self._tickets, self._starts + 1
        shortest = sorted(waiting, key=work.__getitem__)
        return interleave(shortest, work, lambda place, elder: tickets[elder] <= starts + place, step.slots)

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """Count starts; learn from those that ended."""
        self._starts += len(outcome.plan.admitted)
        for request in outcome.finished:
            self._lengths.learn(request)

    def _hand_out(self, elders: Iterable[Request]) -> None:
        """Tickets for the new ones, by how many wait that came before; the preempted are due."""
        before, bound = self._tickets, self._starts + 1 + int(self.options.max_overtaken)
        self._tickets = {
            request: 0 if request.preemptions else before.get(request, bound + place)
            for place, request in enumerate(elders)
        }

    def _work(self, request: Request) -> float:
        output = self._lengths.predict(request) - request.num_output
        return output + float(self.options.prompt_weight) * request.num_tokens
