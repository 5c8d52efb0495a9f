"""A plan and an outcome as lines of a log, without their times: what is compared when they are decided anew."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from engine.core.plan import Outcome, Plan, Why
from engine.core.record import lines

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

HEAD = 8  # requests at the front of the queue that are named
WORD = {why: why.value for why in Why}  # asking a member for its value costs more than a look into a table


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
    counts, samples, waits, drafts = plan.counts, plan.samples, plan.waits, plan.drafts
    first = counts[0] if counts else 1
    return lines.Plan(
        plan.index, 0.0, 0.0, [request.arrival_index for request in plan.requests],
        first if counts.count(first) == len(counts) else list(counts),
        [] if all(samples) else [row for row, yields in enumerate(samples) if not yields],
        _admitted(plan) if plan.admitted else [],
        [request.arrival_index for request in plan.preempted] if plan.preempted else [],
        plan.evicted_pages,
        [(numbers[name], WORD[why], words) for name, (why, words) in waits.items()] if waits else [],
        WORD[plan.otherwise],
        [(numbers[name], WORD[why]) for name, why in plan.cuts.items()] if plan.cuts else [],
        [(request.arrival_index, len(tokens)) for request, tokens in drafts.items()] if drafts else [],
        queue, parked, available, plan.mode,
    )  # fmt: skip


def _admitted(plan: Plan) -> list[tuple[int, int]]:
    """-1 where it lost its row again in the same step."""
    rows, starts = plan.requests, plan.starts
    return [(r.arrival_index, starts[rows.index(r)] if r in rows else -1) for r in plan.admitted]


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
