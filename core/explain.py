"""Why a request got nothing in a step, or less than it owed."""

from __future__ import annotations

from engine.core.plan import Plan, Why
from engine.core.request import Request, State


def explain(request: Request, plan: Plan | None, max_batch_tokens: int) -> tuple[Why, str] | None:
    """The reason and more words, or ``None`` where the request got all that it owed.

    Args:
        request: a live request.
        plan: the last plan, ``None`` before the first.
        max_batch_tokens: the step's budget.
    """
    if request.state is State.PARKED:
        return Why.PARKED, ", ".join(sorted(request.parked_on))
    if plan is None:
        return Why.NOT_ASKED, ""
    if request.state is State.WAITING:
        return plan.waits.get(request.id, (plan.otherwise, ""))
    if request in plan.requests:
        why = plan.cuts.get(request.id)
        return None if why is None else (why, "")
    if request.id in plan.waits:
        return plan.waits[request.id]
    if plan.total_tokens >= max_batch_tokens:
        return Why.TOKEN_BUDGET, ""
    return (Why.PREEMPTION if plan.preempted else Why.NOTHING_OWED), ""
