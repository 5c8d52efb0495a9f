"""What a step computes, in the few numbers that its time depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.plan import Plan


class StepWork(NamedTuple):
    """The work of a step, over its rows.

    Attributes:
        tokens: tokens computed.
        prefill_tokens: those of rows that compute more than one.
        decode_rows: rows that compute one.
        context: positions that each row reads, added up: of a row its start and what it computes.
        scores: positions that each computed token attends to, added up.
        samples: rows that yield a token.
    """

    tokens: int
    prefill_tokens: int
    decode_rows: int
    context: int
    scores: int
    samples: int


def work_of(starts: Sequence[int], counts: Sequence[int], samples: int) -> StepWork:
    """The work of rows that compute ``counts[i]`` tokens from position ``starts[i]`` on; ``samples`` yield a token."""
    tokens, rows = sum(counts), len(counts)
    context = sum(starts) + tokens
    if tokens == rows:
        return StepWork(tokens, 0, rows, context, context, samples)
    ones, scores = counts.count(1), 0
    for start, count in zip(starts, counts, strict=True):
        scores += count * start + count * (count + 1) // 2
    return StepWork(tokens, tokens - ones, ones, context, scores, samples)


def work_of_plan(plan: Plan) -> StepWork:
    """The work of a plan."""
    return work_of(plan.starts, plan.counts, sum(plan.samples))
