"""``fair-share``: the tenant that was served least goes first.

Source: the Virtual Token Counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024), weighted.
A tenant's counter grows with the prompt and output tokens it is served, over its weight. Among the tenants that wait,
the one with the lowest counter starts its oldest request. A tenant that was idle is lifted to the lowest counter of
those that kept waiting: idleness earns no credit. Work-conserving: nobody waits while there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Outcome
from engine.core.protocols import PluginOptions, Policy
from engine.core.request import Request
from engine.core.view import StepView
from engine.plugins.policies._metadata import label
from engine.plugins.policies._service import Service

MAX_TENANTS = 4096


class FairShare(Policy):
    """Token fairness across tenants, whatever their request rates.

    Attribute ``counters``: tenant -> weighted tokens served (after lifts).
    """

    name = "fair-share"
    aliases = ("vtc",)

    class Options(PluginOptions):
        key: str = Field("tenant", description="metadata key that names the tenant; requests without it share one")
        weights: dict[str, float] = Field(default_factory=dict, description="share of a tenant (default 1)")
        prompt_weight: float = Field(1.0, gt=0, description="what a prompt token counts")
        output_weight: float = Field(2.0, gt=0, description="what an output token counts")

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._per_prompt = float(self.options.prompt_weight)
        self._per_output = float(self.options.output_weight)
        self.counters: dict[str, float] = {}
        self._floor = 0.0  # where tenants that come back are lifted to
        self._queued: set[str] = set()  # tenants that waited when last asked
        self._service = Service(self._cost, self._charge)
        self._tenants: dict[Request, str] = {}  # of those that wait
        self._first: tuple[Request, ...] = ()  # those that may have started since

    @hookimpl
    def order(self, step: StepView, waiting: Sequence[Request]) -> Sequence[Request] | None:
        """The lowest counter first, counting for each start the prompt that it is about to be served.

        As many places as there are slots; the others keep theirs.
        """
        if step.slots <= 0:
            return None
        self._service.settle(lambda: step.running, self._first)
        known = self._tenants
        tenants = {request: known[request] if request in known else self._tenant(request) for request in waiting}
        self._tenants = tenants
        queues: dict[str, deque[Request]] = {}
        for request in waiting:
            queues.setdefault(tenants[request], deque()).append(request)
        self._lift(set(queues))
        heap = [(self.counters[tenant], tenant) for tenant in queues]
        heapify(heap)
        first: dict[Request, None] = {}
        while heap and len(first) < step.slots:
            counter, tenant = heap[0]
            request = queues[tenant].popleft()
            first[request] = None
            if queues[tenant]:
                heapreplace(heap, (counter + self._cost(request) / self._weight(tenant), tenant))
            else:
                heappop(heap)
        self._first = tuple(first)
        return [*first, *(request for request in waiting if request not in first)]

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """Those that ended pay what they owe; the others pay when somebody asks."""
        for request in outcome.finished:
            self._service.end(request)

    # ---- inside

    def _tenant(self, request: Request) -> str:
        return label(request, self.options.key)

    def _weight(self, tenant: str) -> float:
        weight: float = self.options.weights.get(tenant, 1.0)
        return weight if weight > 0 else 1.0

    def _cost(self, request: Request) -> float:
        prompt = request.num_prompt
        return self._per_prompt * prompt + self._per_output * (len(request.tokens) - prompt)

    def _charge(self, request: Request, cost: float) -> None:
        tenant = self._tenant(request)
        self.counters[tenant] = self.counters.get(tenant, self._floor) + cost / self._weight(tenant)

    def _lift(self, queued: set[str]) -> None:
        """Tenants that did not wait before start from the lowest of those that did."""
        stayed = queued & self._queued
        if stayed:
            self._floor = max(self._floor, min(self.counters[tenant] for tenant in stayed))
        for tenant in queued - stayed:
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), self._floor)
        self._queued = queued
        if len(self.counters) > MAX_TENANTS:  # who is no further than the floor would be lifted to it anyway
            self.counters = {t: c for t, c in self.counters.items() if c > self._floor or t in queued}
