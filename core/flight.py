"""Steps in flight: one in ``sync`` mode; in ``overlap`` mode the next is planned before the last one's outcome."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine.core.errors import EngineError, InvariantViolation
from engine.core.plan import NO_DRAFT, Plan
from engine.core.request import Request

if TYPE_CHECKING:
    from engine.core.step import Step


class Planned(NamedTuple):
    """A plan that is neither committed nor failed, and the step that made it."""

    plan: Plan
    step: Step
    alone: bool  # no other plan was in flight when it was made


class Flight:
    """The plans in flight, oldest first. They are executed, and end, in this order.

    Args:
        overlap: two may be in flight, else one.
    """

    def __init__(self, *, overlap: bool) -> None:
        self.overlap = overlap
        self._planned: deque[Planned] = deque()

    def __len__(self) -> int:
        return len(self._planned)

    @property
    def oldest(self) -> Plan | None:
        """The plan whose outcome is committed next."""
        return self._planned[0].plan if self._planned else None

    @property
    def last(self) -> Step | None:
        """The step planned last, if it is in flight."""
        return self._planned[-1].step if self._planned else None

    def check_room(self) -> None:
        """Raise ``EngineError`` where another plan may not be made yet."""
        if len(self._planned) > self.overlap:
            raise EngineError("the last plan was neither committed nor failed")

    def depart(self, plan: Plan, step: Step) -> None:
        """Another plan was made. Mutates."""
        self._planned.append(Planned(plan, step, alone=not self._planned))

    def land(self, plan: Plan) -> tuple[Step, bool]:
        """The oldest plan ends; returns its step, and whether it was alone. Mutates.

        Raises:
            InvariantViolation: the plan is not the oldest in flight.
        """
        if not self._planned or self._planned[0].plan is not plan:
            raise InvariantViolation("a plan ends with its own outcome, and only the oldest in flight ends")
        _, step, alone = self._planned.popleft()
        return step, alone

    def abandon(self) -> list[Planned]:
        """None of the plans in flight will be executed; returns them. Mutates."""
        planned = list(self._planned)
        self._planned.clear()
        return planned

    def steps(self) -> list[Step]:
        """Steps in flight, oldest first."""
        return [planned.step for planned in self._planned]

    def expect(
        self, rows: Sequence[Request], samples: Sequence[bool], drafts: Mapping[Request, Sequence[int]], drafting: int
    ) -> tuple[int, ...]:
        """Rows of a plan that is being sealed continue those of the plan before: say which, and count what they yield.

        Returns for each row the row of the last plan whose tokens it continues, or -1. Mutates ``pending`` and, for a
        model that drafts, ``drafts`` of the requests that will yield tokens.
        """
        before = self._planned[-1].plan.requests if self._planned else ()
        places = {request: row for row, request in enumerate(before)}
        awaits = tuple([places[request] if request.pending else -1 for request in rows])
        unknown = (NO_DRAFT,) * drafting
        for request, sampling in zip(rows, samples, strict=True):
            if sampling:
                request.pending += 1 + (len(drafts.get(request, ())) if drafts else 0)
                if drafting:
                    request.drafts = unknown
                    request.quiet = 0
        return awaits
