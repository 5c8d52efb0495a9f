"""Counters of an engine core. Gauges are read from live state when asked, so they cannot go stale."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from engine.core.plan import Plan
from engine.core.request import Finish


class StepStats(NamedTuple):
    """One plan in numbers."""

    step: int
    mode: str
    rows: int
    tokens: int
    decode_rows: int  # rows that compute the token sampled last, alone or with drafts
    prefill_tokens: int
    draft_tokens: int
    admitted: int
    cached_tokens: int  # of those admitted
    preempted: int
    evicted_pages: int
    common_prefix_pages: int


def step_stats(plan: Plan) -> StepStats:
    """Count what a plan holds."""
    drafts = sum(map(len, plan.drafts.values()))
    starts = dict(zip(plan.requests, plan.starts, strict=True))
    rows = zip(plan.requests, plan.starts, strict=True)
    decodes = sum(start >= request.prefill_target for request, start in rows)
    return StepStats(
        step=plan.index,
        mode=plan.mode,
        rows=len(plan.requests),
        tokens=plan.total_tokens,
        decode_rows=decodes,
        prefill_tokens=plan.total_tokens - decodes - drafts,
        draft_tokens=drafts,
        admitted=len(plan.admitted),
        cached_tokens=sum(starts[request] for request in plan.admitted),
        preempted=len(plan.preempted),
        evicted_pages=plan.evicted_pages,
        common_prefix_pages=plan.common_prefix_pages,
    )


@dataclass(slots=True)
class Counters:
    """Totals since the start. They only grow."""

    steps: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    looked_up_tokens: int = 0  # tokens of requests as they started: cached_tokens of them needed no computing
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafts that the model confirmed
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    late_results: int = 0
    loaded_tokens: int = 0  # that came from connectors
    failed_loads: int = 0  # loads of which a part or all did not come
    late_loads: int = 0  # look-ups and loads that were not waited for any longer
    slow_loads: int = 0  # not begun, since computing has been faster
    unsaved_pages: int = 0  # not handed to connectors, which had enough to save
    failed_saves: int = 0
    stray_events: int = 0
    failed_steps: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {f"finished_{reason.value}": 0 for reason in Finish})

    def ended(self, reason: Finish) -> None:
        """Count one request under its terminal reason."""
        self.finished[f"finished_{reason.value}"] += 1

    def flat(self) -> dict[str, int | float]:
        """All counters in one level."""
        values = asdict(self)
        return {**values.pop("finished"), **values}
