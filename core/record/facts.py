"""A plan and an outcome as lines of a log, without their times: what is compared when they are decided anew."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from engine.core.plan import Outcome, Plan
from engine.core.record import lines

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

HEAD = 8  # requests at the front of the queue that are named


def queue_of(core: EngineCore) -> list[int]:
    """The queue's length and its first requests; empty where nobody waits."""
    waiting = core.waiting
    return [len(waiting), *[request.arrival_index for request in islice(waiting, HEAD)]] if waiting else []


def plan_line(plan: Plan, numbers: Mapping[str, int], queue: list[int], parked: int, available: int) -> lines.Plan:
    """What a plan decided.

    Args:
        numbers: of requests by their ids.
        queue: what ``queue_of`` says after it. parked, available: requests and pages after it.
    """
    counts, samples = plan.counts, plan.samples
    first = counts[0] if counts else 1
    return lines.Plan(
        step=plan.index,
        t=0.0,
        rows=[request.arrival_index for request in plan.requests],
        counts=first if counts.count(first) == len(counts) else list(counts),
        partial=[] if all(samples) else [row for row, yields in enumerate(samples) if not yields],
        admitted=_admitted(plan) if plan.admitted else [],
        preempted=[request.arrival_index for request in plan.preempted],
        evicted=plan.evicted_pages,
        waits=[(numbers[name], why.value, words) for name, (why, words) in plan.waits.items()],
        rest=plan.otherwise.value,
        cuts=[(numbers[name], why.value) for name, why in plan.cuts.items()] if plan.cuts else [],
        drafts=[(request.arrival_index, len(drafts)) for request, drafts in plan.drafts.items()] if plan.drafts else [],
        queue=queue,
        parked=parked,
        available=available,
        mode=plan.mode,
    )


def _admitted(plan: Plan) -> list[tuple[int, int]]:
    starts = dict(zip(plan.requests, plan.starts, strict=True))
    return [(request.arrival_index, starts.get(request, -1)) for request in plan.admitted]


def commit_line(outcome: Outcome, yielded: int | None) -> lines.Commit:
    """What came of a plan.

    Args:
        yielded: tokens of output of all rows, where those that sample yielded one each if any; ``None``: look at each.
    """
    plan = outcome.plan
    usual = yielded is not None and yielded == sum(plan.samples)
    return lines.Commit(
        step=plan.index,
        t=0.0,
        tokens=None if usual else [len(tokens) for tokens in outcome.tokens],
        finished=[(request.arrival_index, request.finish.value) for request in outcome.finished if request.finish],
        dropped=list(outcome.dropped),
        errors=list(outcome.errors),
        proposals=[(row, len(drafts)) for row, drafts in outcome.proposals.items()] if outcome.proposals else [],
    )
