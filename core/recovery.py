"""Taking back what failed: a step as a whole, or single rows of it, with all that later steps have built on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.plan import Outcome, Plan
from engine.core.request import Request, State
from engine.core.step import Step

if TYPE_CHECKING:
    from engine.core.loop import EngineCore


def isolate(core: EngineCore, outcome: Outcome, step: Step) -> None:
    """Rows failed alone: nothing that they were to compute may be matched, and whoever shared it starts again.

    Mutates. Called before the outcome is applied.
    """
    plan = outcome.plan
    failed = [plan.requests[row] for row in outcome.errors]  # also those aborted: their pages may be idle
    ending = {plan.requests[row] for row in outcome.errors if plan.requests[row].epoch == plan.epochs[row]}
    spoilt = list(failed)
    steps = [step, *core.flight.steps()]
    for each in steps:
        spoilt += [request for request in each.journal.dependents(spoilt) if request not in spoilt]
    for each in steps:
        for request in spoilt:
            core.kv.unpublish(each.journal.take_back(request))
    for request in spoilt:
        if request not in ending:  # one that failed may have started again meanwhile, on what it had published itself
            start_again(core, request)


def fail_step(core: EngineCore, plan: Plan, why: str) -> None:
    """The oldest plan in flight was not computed, and none after it will be. Mutates."""
    step, _ = core.flight.land(plan)
    later = core.flight.abandon()
    core.counters.failed_steps += 1
    for each in [step, *[planned.step for planned in later]]:
        core.kv.unpublish(each.journal.take_back_all())
    for request, epoch in zip(plan.requests, plan.epochs, strict=True):
        if request.epoch == epoch:
            core.fail(request, f"the step failed: {why}")
    for planned in later:
        for request, epoch in reversed(list(zip(planned.plan.requests, planned.plan.epochs, strict=True))):
            if request.epoch == epoch:
                start_again(core, request)


def interrupted(core: EngineCore) -> str | None:
    """Something that is no error (Ctrl-C) struck in the middle of a step. Mutates.

    Whatever was half done is given up: those that run start again, nothing stays cached. Returns why the engine cannot
    go on, if it struck where books are kept and they are wrong now; else ``None``.
    """
    try:
        core.flight.abandon()
        for request in reversed(list(core.running)):
            start_again(core, request)
        core.kv.reset()
        core.check()
    except Exception as error:  # half-kept books may fail in any way
        return f"it was interrupted in the middle of its books: {type(error).__name__}: {error}"
    return None


def start_again(core: EngineCore, request: Request) -> None:
    """What steps in flight compute of the request is worth nothing: not even their tokens are applied. Mutates."""
    if request.state is State.RUNNING:
        core.counters.preemptions += 1
        core.give_up(request, front=True)
    request.epoch += 1
