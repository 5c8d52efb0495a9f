"""What people who watch an engine are shown of it, asked between two steps. Nothing is kept while nobody asks.

Everything here is bounded, in size and in time, whatever the number of requests, pages and nodes; and it says of a
request who it is and how large, never what was said.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from engine.core.errors import EngineError
from engine.core.explain import explain
from engine.core.lens.pages import PageMap
from engine.core.lens.steps import StepLens
from engine.core.plan import Why

if TYPE_CHECKING:
    from engine.core.loop import EngineCore
    from engine.core.plan import Plan
    from engine.core.request import Request

LEASE = 10.0  # seconds without a look, after which nobody looks any more
FIRST = 24  # of the queue, that are told one by one
COUNTED = 512  # of the queue, whose reasons are counted
NODES = 96  # of a cache's tree
WORDS = 160  # characters of what a policy says


class Lens:
    """One core, as it is watched. The engine's thread only, between steps.

    Attributes:
        steps: what was seen of its steps; ``None`` while nobody looks.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.steps: StepLens | None = None
        self._map: PageMap | None = None
        self._last: Plan | None = None
        self._until = 0.0

    def stepped(self, seconds: float) -> None:
        """A step has ended that took so long. Asked only while there are ``steps``. Mutates."""
        if time.monotonic() > self._until:
            self.close()
            return
        core, plan = self._core, self._core.last_plan
        if self.steps is not None and plan is not None and plan is not self._last:
            self._last = plan
            if plan or plan.preempted:
                self.steps.saw(plan, core.now() - seconds, seconds, len(core.waiting))

    def ask(self, what: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """``about``, ``look`` or ``close`` by name, the answer as plain values: for other processes."""
        known: dict[str, Callable[..., dict[str, Any]]] = {"about": self.about, "look": self.look, "close": self.close}
        if what not in known:
            raise EngineError(f"{what!r} cannot be asked of a lens: {', '.join(known)} can")
        return known[what](**options)

    def about(self) -> dict[str, Any]:
        """Whether the KV cache keeps a tree. Does not mutate: asking this is no look."""
        return {"tree": self._core.kv.outline(1) is not None}

    def look(self, since: int = 0) -> dict[str, Any]:
        """What there is to see, of steps those after number ``since``. Steps are seen from the first look on, and no
        more when none has come for some seconds. Mutates."""
        core = self._core
        self._until = time.monotonic() + LEASE
        if self.steps is None or self._map is None:
            self.steps, self._map = StepLens(), PageMap(core)
        seen, tree = self.steps.since(since), core.kv.outline(NODES)
        return {
            "now": core.now(),
            "step": core.counters.steps,
            "values": core.stats(),
            "steps": [(*one[:-1], [tuple(cell) for cell in one.cells]) for one in seen],
            "names": self.steps.names,
            "queue": queue(core),
            "pages": self._map.look(),
            "tree": None if tree is None else [tuple(node) for node in tree],
            "hooks": core.hooks.asked(),
            "faults": [fault._asdict() for fault in core.hooks.faults()],
        }

    def close(self) -> dict[str, Any]:
        """Nobody looks any more: forget what was seen. Idempotent. Mutates."""
        self.steps = self._map = self._last = None
        return {}


def queue(core: EngineCore) -> dict[str, Any]:
    """The first of the queue and of the parked with their reasons, and how many wait for what. Does not mutate.

    Reasons are counted as far as the first few hundred; the others are ``beyond``.
    """
    waiting, parked = core.waiting, core.parked
    looked = [*islice(waiting, COUNTED), *islice(parked.values(), COUNTED)]
    reasons: Counter[str] = Counter()
    first = []
    for place, request in enumerate(looked):
        why, words = explain(request, core.last_plan, core.limits.max_batch_tokens) or (Why.NOT_ASKED, "")
        reasons[why.value] += 1
        if place < FIRST:
            first.append(told(core, request, place + 1, why.value, words))
    beyond = len(waiting) + len(parked) - len(looked)
    return {"first": first, "reasons": dict(reasons), "beyond": beyond, "length": len(waiting), "parked": len(parked)}


def told(core: EngineCore, request: Request, place: int, why: str, words: str) -> dict[str, Any]:
    """One that waits, as plain values."""
    tenant = request.metadata.get("tenant")
    return {
        "id": request.id,
        "place": place,
        "why": why,
        "words": words[:WORDS],
        "prompt_tokens": request.num_prompt,
        "output_tokens": request.num_output,
        "seconds": core.now() - request.arrival,
        "priority": request.priority,
        "preemptions": request.preemptions,
        "tenant": tenant[:WORDS] if isinstance(tenant, str) else "",
    }
