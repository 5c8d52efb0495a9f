"""A request as it stands now: where it is, why it waits, what would unblock it, and when it may start by estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.core.plan import Why
from engine.core.request import Request, State

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

FEW = 2  # starts: with fewer, nothing is estimated


def state_of(core: EngineCore, request: Request) -> dict[str, Any]:
    """As plain values; seconds count from its arrival. Does not mutate; costs time in proportion to the queue."""
    now, why = core.now(), core.why(request.id)
    queue = list(core.waiting) if request.state is State.WAITING else []
    position = queue.index(request) + 1 if queue else None
    return {
        "id": request.id,
        "number": request.arrival_index,
        "state": request.state.value,
        "seconds": now - request.arrival,
        "position": position,
        "queue": len(core.waiting),
        "why": None if why is None else why[0].value,
        "words": None if why is None else why[1],
        "unblock": None if why is None else unblock(core, request, *why),
        "estimated_start": None if position is None else estimate(core, request, position),
        "prompt_tokens": request.num_prompt,
        "output_tokens": request.num_output,
        "computed_tokens": request.computed,
        "planned_tokens": request.planned - request.computed,
        "cached_tokens": request.cached_tokens,
        "pages": len(request.pages),
        "preemptions": request.preemptions,
        "priority": request.priority,
        "tenant": request.metadata.get("tenant"),
        "deadline": None if request.deadline is None else request.deadline - now,
    }


def estimate(core: EngineCore, request: Request, position: int) -> float | None:
    """Seconds until a waiting request at this place of the queue starts; ``None``: nobody can tell.

    At the rate at which others have started since it came, up to now, so that a queue that stands still is seen to.
    """
    starts = [when for when in core.starts if when >= request.arrival]
    if len(starts) < FEW:
        return None
    since = starts[0] if len(core.starts) == core.starts.maxlen and len(starts) == len(core.starts) else request.arrival
    return position * (core.now() - since) / len(starts)


def unblock(core: EngineCore, request: Request, why: Why, words: str) -> str:
    """What has to happen before it gets something, in words with the numbers of this moment."""
    limits = core.limits
    match why:
        case Why.TOKEN_BUDGET:
            return f"a step that has some of its {limits.max_batch_tokens} tokens left for it (max_batch_tokens)"
        case Why.RUN_SLOTS:
            return f"one of the {len(core.running)} that run must end (max_running {limits.max_running})"
        case Why.PAGES:
            return _pages(core, request)
        case Why.RESERVE:
            return (
                f"pages that are not reserved for the outputs of the {len(core.running)} that run: one of them must "
                f"end ({core.kv.available()} of {limits.num_pages} pages are free or evictable)"
            )
        case Why.CHUNK:
            return f"the prompt that is computed in chunks must be complete{_whose(core)}"
        case Why.BEHIND:
            return _behind(core, request)
        case Why.NOT_ASKED:
            return "a step in which the scheduler looks at the queue: this one served those that run"
        case Why.PARKED:
            return f"what it waits for outside the queue: {words}"
        case Why.POLICY:
            return f"the policy that objects must let it pass: {words}"
        case Why.ORDER:
            return "the order hook must put it among those that may start"
        case _:
            return REST[why]


REST = {
    Why.PREFILL_BUDGET: "the next prefill batch: this one has as many prompt tokens as it may",
    Why.DELAY: "prefill is held back for company: more requests, or some steps",
    Why.PREEMPTION: "a step in which nobody is preempted",
    Why.ADAPTERS: "one of the adapters at work must have nothing left that runs",
    Why.PREFIX: "the request that computes their common prefix must get there",
    Why.NOTHING_OWED: "the step in flight: all that it owes is planned",
}
"""What has to happen where there is nothing to count."""


def _pages(core: EngineCore, request: Request) -> str:
    """How many pages there are, and how many it takes to hold all that is known of it."""
    need, available = -(-request.num_tokens // core.limits.page_size) - len(request.pages), core.kv.available()
    missing = f": {need - available} more must come free" if need > available else ""
    return f"{need} pages for its {request.num_tokens} tokens, {available} are free or evictable{missing}"


def _whose(core: EngineCore) -> str:
    for request in core.running:
        if request.planned < request.prefill_target:
            return f": {request.id}, {request.prefill_target - request.planned} tokens are left"
    return ""


def _behind(core: EngineCore, request: Request) -> str:
    """The first request before it that was looked at and refused is the one that the queue stopped at."""
    for other in core.waiting:
        if other is request:
            break
        why = core.why(other.id)
        if why is not None and why[0] not in (Why.BEHIND, Why.NOT_ASKED):
            return f"{other.id} before it in the queue must start, which waits for {why[0].value}: " + unblock(
                core, other, *why
            )
    return "those before it in the queue must start"


def overview(core: EngineCore, most: int) -> dict[str, Any]:
    """At most so many live requests: those that run, then the queue in order, then the parked. Does not mutate."""
    everybody = [*core.running, *core.waiting, *core.parked.values()]
    found = []
    for position, request in enumerate(everybody[:most], 1 - len(core.running)):
        why = core.why(request.id)
        found.append(
            {
                "id": request.id,
                "state": request.state.value,
                "position": position if request.state is State.WAITING else None,
                "why": None if why is None else why[0].value,
                "words": None if why is None else why[1],
                "prompt_tokens": request.num_prompt,
                "output_tokens": request.num_output,
                "seconds": core.now() - request.arrival,
            }
        )
    return {"requests": found, "live": len(everybody)}
