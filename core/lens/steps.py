"""The newest steps as a viewer is shown them: who computed how many tokens, and what kind of work it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.core.plan import Plan
    from engine.core.request import Request

STEPS = 120  # that are remembered
LANES = 24  # requests that are followed one by one
WORDS = 160  # characters of what somebody else says
PLANS = 8  # that are looked through for how far a preempted request had come


class Kind(IntEnum):
    """What a request did in a step."""

    DECODE = 0  # the token sampled last, alone or with drafts
    PREFILL = 1  # a part of its prompt
    HIT = 2  # the same, behind a prefix that the cache gave
    AGAIN = 3  # tokens that had been computed before it was preempted
    PREEMPTED = 4  # it gave up its pages


DECODES = (int(Kind.DECODE), 0, 0)

Cell = tuple[int, int, int, int, int, str]
"""One request in one step: its lane and number; the ``Kind``; tokens that it computed, or lost, where it was preempted;
tokens that the cache gave; why it got no more (a ``Why``, or empty). Plain, since there are many."""


class Seen(NamedTuple):
    """One step: its number, when it began, how long it took, tokens by kind, and what was decided beside."""

    step: int
    at: float
    seconds: float
    mode: str
    decode: int
    prefill: int
    again: int
    found: int
    rows: int
    waiting: int
    admitted: int
    preempted: int
    evicted: int
    cells: list[Cell]


class StepLens:
    """Looks at plans as they are made. What it remembers is bounded; what it costs is in proportion to a plan's rows,
    and next to nothing where a step decides as the one before.

    Attributes:
        seen: the newest steps.
        names: id, tenant and prompt tokens of the requests in their cells, by number.
    """

    def __init__(self) -> None:
        self.seen: deque[Seen] = deque(maxlen=STEPS)
        self.names: dict[int, tuple[str, str, int]] = {}
        self._plans: deque[Plan] = deque(maxlen=PLANS)
        self._lanes: list[Request | None] = [None] * LANES
        self._lane_of: dict[Request, int] = {}
        self._lost: dict[Request, int] = {}  # preempted -> tokens that it had computed
        self._steady: list[Cell] | None = None  # cells of the plan before, where all that it did was to decode

    def saw(self, plan: Plan, at: float, seconds: float, waiting: int) -> None:
        """A plan was made, in a step that began at ``at`` and took so long. Mutates."""
        before = self._plans[-1] if self._plans else None
        if self._steady is not None and before is not None and _same(plan, before):
            cells, sums = self._steady, (plan.total_tokens, 0, 0, 0)
        else:
            cells, sums = self._look(plan)
            self._steady = cells if sums[1] == sums[2] == 0 and not plan.preempted else None
        self._plans.append(plan)
        self.seen.append(
            Seen(
                plan.index, at, seconds, plan.mode, *sums, len(plan.requests), waiting, len(plan.admitted),
                len(plan.preempted), plan.evicted_pages, cells,
            )
        )  # fmt: skip

    def since(self, step: int) -> list[Seen]:
        """Steps with greater numbers, as far as they are remembered. Forgets names that none needs. Mutates."""
        used = {cell[1] for seen in self.seen for cell in seen.cells}
        for number in [number for number in self.names if number not in used]:
            del self.names[number]
        for request in [request for request in self._lost if request.finished]:
            del self._lost[request]
        return [seen for seen in self.seen if seen.step > step]

    # ---- inside

    def _look(self, plan: Plan) -> tuple[list[Cell], tuple[int, int, int, int]]:
        """Cells of the requests that are followed; decoded, prefilled, again and found tokens of all."""
        cells = [cell for request in plan.preempted if (cell := self._preempted(request)) is not None]
        requests, counts = plan.requests, plan.counts
        special = self._prefills(plan)
        prefill = again = found = 0
        for row, (_, hit, repeated) in special.items():
            found, again, prefill = found + hit, again + repeated, prefill + counts[row] - repeated
        self._give_lanes(requests)
        lane_of, cuts = self._lane_of.get, plan.cuts
        for row, lane in [
            (row, lane) for row, request in enumerate(requests) if (lane := lane_of(request)) is not None
        ]:
            request = requests[row]
            kind, hit, _ = special.get(row, DECODES)
            why = cuts[request.id].value if cuts and request.id in cuts else ""
            cells.append((lane, request.arrival_index, kind, counts[row], hit, why))
        return cells, (plan.total_tokens - prefill - again, prefill, again, found)

    def _prefills(self, plan: Plan) -> dict[int, tuple[int, int, int]]:
        """Kind, tokens found and tokens computed again, of the rows that do not decode."""
        starts = plan.starts
        rows = [row for row, request in enumerate(plan.requests) if starts[row] < request.prefill_target]
        admitted = set(plan.admitted) if rows else ()
        found = {}
        for row in rows:
            request, start = plan.requests[row], starts[row]
            hit = start if request in admitted else 0
            again = min(plan.counts[row], max(0, self._lost.get(request, 0) - start))
            found[row] = (int(Kind.AGAIN if again else Kind.HIT if hit else Kind.PREFILL), hit, again)
        return found

    def _preempted(self, request: Request) -> Cell | None:
        lost = self._computed(request)
        self._lost[request] = max(lost, self._lost.get(request, 0))
        lane = self._lane_of.pop(request, None)
        if lane is None:
            return None
        self._lanes[lane] = None
        return lane, request.arrival_index, int(Kind.PREEMPTED), lost, 0, ""

    def _computed(self, request: Request) -> int:
        """How far a request had come before it was preempted, by the plans that are remembered."""
        for plan in reversed(self._plans):
            if request in plan.requests:
                row = plan.requests.index(request)
                return plan.starts[row] + plan.counts[row]
        return 0

    def _give_lanes(self, requests: Sequence[Request]) -> None:
        """Lanes of those that ended before this step go to the first that have none."""
        lane_of, lanes = self._lane_of, self._lanes
        for request in [one for one in lane_of if one.finished and one not in requests]:
            lanes[lane_of.pop(request)] = None
        if len(lane_of) == LANES:
            return
        for request in requests:
            if request not in lane_of and not request.finished:
                lane = lanes.index(None)
                lanes[lane], lane_of[request] = request, lane
                self.names[request.arrival_index] = (request.id, tenant_of(request), request.num_prompt)
                if len(lane_of) == LANES:
                    return


def tenant_of(request: Request) -> str:
    """Who asked, as far as it is said in few words; else empty."""
    tenant = request.metadata.get("tenant")
    return tenant[:WORDS] if isinstance(tenant, str) else ""


def _same(plan: Plan, before: Plan) -> bool:
    """Whether a plan that follows one which only decoded goes on with it."""
    return plan.requests == before.requests and plan.counts == before.counts and not (plan.preempted or plan.admitted)
