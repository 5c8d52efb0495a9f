"""``dlpm``: longest cached prefix first, among the tenants that have quantum left.

Source: Deficit Longest Prefix Match of "Locality-aware Fair Scheduling in LLM Serving" (Cao et al. 2025). Each tenant
has a deficit that what it is served takes from: prompt tokens that were not cached, and output tokens. Within it the
order is by cached prefix. When no tenant that waits has any left, all of them get a quantum more. The larger the
quantum, the more locality; the difference between two tenants that keep waiting stays bounded by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice

from pydantic import Field

from engine.core.hookspecs import hookimpl
from engine.core.plan import Outcome
from engine.core.protocols import PluginOptions, Policy
from engine.core.request import Request
from engine.core.view import StepView
from engine.plugins.policies._known import Known
from engine.plugins.policies._metadata import label
from engine.plugins.policies._service import Service

MAX_TENANTS = 4096


class DLPM(Policy):
    """Locality-aware fair sharing across tenants. Attribute ``deficits``: tenant -> tokens it may still be served."""

    name = "dlpm"
    requires = frozenset({"prefix-cache"})

    class Options(PluginOptions):
        key: str = Field("tenant", description="metadata key that names the tenant; requests without it share one")
        quantum: float = Field(1024.0, gt=0, description="tokens that each waiting tenant gets when none has any left")
        output_weight: float = Field(
            2.0, gt=0, description="what an output token counts beside an uncached prompt token"
        )
        window: int = Field(128, ge=1, description="how many at the queue's front are looked up in the cache")

    def __init__(self, options: Options | None = None) -> None:
        super().__init__(options)
        self._per_output = float(self.options.output_weight)
        self.deficits: dict[str, float] = {}
        self._service = Service(self._cost, self._charge)
        self._tenants: Known[str] = Known(fixed=True)
        self._cached: Known[int] = Known()
        self._first: tuple[Request, ...] = ()  # those that may have started since

    @hookimpl
    def order(self, step: StepView, waiting: Sequence[Request]) -> Sequence[Request] | None:
        """Tenants with quantum first, by cached prefix; as many places as there are slots, the rest by prefix."""
        if step.slots <= 0:
            return None
        self._service.settle(lambda: step.running, self._first)
        tenants = self._tenants.update(waiting, self._tenant)  # oldest first
        cached = self._cached.update(self._window(tenants), step.cached)
        left = self._replenish(set(tenants.values()))
        longest = sorted(cached, key=cached.__getitem__, reverse=True)
        order: list[Request] = []
        while longest and len(order) < step.slots:
            behind: list[Request] = []
            for request in longest:
                tenant = tenants[request]
                if left[tenant] > 0:
                    left[tenant] -= request.num_tokens - cached[request]
                    order.append(request)
                else:
                    behind.append(request)
            longest = behind
            _refill(left, {tenants[request] for request in behind}, float(self.options.quantum))
        self._first = tuple(order)
        return [*order, *longest, *(request for request in waiting if request not in cached)]

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """Those that ended pay what they owe; the others pay when somebody asks."""
        for request in outcome.finished:
            self._service.end(request)

    # ---- inside

    def _tenant(self, request: Request) -> str:
        return label(request, self.options.key)

    def _window(self, tenants: Mapping[Request, str]) -> list[Request]:
        """The oldest, and of each tenant its oldest at least: a crowd cannot hide the others."""
        if len(tenants) <= self.options.window:
            return list(tenants)
        heads = {tenant: request for request, tenant in reversed(list(tenants.items()))}
        return list(dict.fromkeys([*islice(tenants, self.options.window), *heads.values()]))

    def _cost(self, request: Request) -> float:
        uncached = max(0, request.num_prompt - request.cached_tokens)
        return uncached + self._per_output * request.num_output

    def _charge(self, request: Request, cost: float) -> None:
        tenant = self._tenant(request)
        self.deficits[tenant] = self.deficits.get(tenant, 0.0) - cost

    def _replenish(self, queued: set[str]) -> dict[str, float]:
        """A quantum for all that wait, if none of them has any left. Who does not wait keeps no credit. Mutates."""
        kept = {tenant: deficit for tenant, deficit in self.deficits.items() if deficit < 0 or tenant in queued}
        if len(kept) > MAX_TENANTS:
            kept = {tenant: deficit for tenant, deficit in kept.items() if tenant in queued}
        self.deficits = {**dict.fromkeys(queued, 0.0), **kept}
        _refill(self.deficits, queued, float(self.options.quantum))
        return dict(self.deficits)


def _refill(deficits: dict[str, float], tenants: set[str], quantum: float) -> None:
    """As many quanta for each of these tenants as it takes until one of them has some. Mutates."""
    if tenants and max(deficits[tenant] for tenant in tenants) <= 0:
        rounds = math.floor(-max(deficits[tenant] for tenant in tenants) / quantum) + 1
        for tenant in tenants:
            deficits[tenant] += rounds * quantum
