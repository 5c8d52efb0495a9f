"""For executors in overlap mode: rows that go on from a token which the step before sampled, not yet committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.plan import Outcome, Plan


class Row(NamedTuple):
    """Where a row really starts, and the tokens that it computes (its drafts, which follow them, left out)."""

    start: int
    tokens: Sequence[int]
    before: Sequence[int] = ()  # tokens ahead of ``tokens`` that the request may not know yet


class Continuations:
    """Remembers what the last plan yielded. One for an executor, which tells it of every outcome, in order.

    The host's way. A device that keeps sampled tokens gathers them by ``plan.awaits`` instead of waiting for them.
    """

    def __init__(self) -> None:
        self._last: Sequence[Sequence[int]] = ()
        self._drafts: Sequence[int] = ()

    def rows(self, plan: Plan) -> list[Row]:
        """Each row with what it computes. A row that continues one that failed computes token 0: it will be dropped."""
        awaits = plan.awaits or (-1,) * len(plan.requests)
        return [
            Row(start, request.tokens[start : start + count]) if awaited < 0 else self._continued(start, awaited)
            for request, start, count, awaited in zip(plan.requests, plan.starts, plan.counts, awaits, strict=True)
        ]

    def keep(self, outcome: Outcome) -> Outcome:
        """Remember an outcome; returns it. Mutates."""
        plan = outcome.plan
        self._last = outcome.tokens
        self._drafts = [len(plan.drafts.get(request, ())) for request in plan.requests] if plan.drafts else ()
        return outcome

    def _continued(self, start: int, awaited: int) -> Row:
        """The row goes on after the accepted drafts of the one that it continues; it was planned after all of them."""
        tokens = self._last[awaited]
        if not tokens:
            return Row(start, (0,))
        drafts = self._drafts[awaited] if self._drafts else 0
        return Row(start - (drafts + 1 - len(tokens)), tokens[-1:], tokens[:-1])


def certain(plan: Plan, row: int, known: Row) -> tuple[int, Sequence[int]]:
    """How many tokens of a row's request are committed, and what a step in flight has sampled after them.

    Args:
        known: what ``Continuations.rows`` says of the row.
    """
    if not plan.awaits or plan.awaits[row] < 0:
        return known.start + len(known.tokens), ()
    return known.start - len(known.before), [*known.before, *known.tokens]
