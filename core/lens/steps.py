"""The newest steps as a viewer is shown them: who computed how many tokens, and what kind of work it was."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.core.plan import Plan
    from engine.core.request import Request

STEPS = 120  # that are remembered
LANES = 24  # requests that are followed one by one
PLANS = 8  # that are looked through for how far a preempted request had come


class Kind(IntEnum):
    """What a request did in a step."""

    DECODE = 0  # the token sampled last, alone or with drafts
    PREFILL = 1  # a part of its prompt
    HIT = 2  # the same, behind a prefix that the cache gave
    AGAIN = 3  # tokens that had been computed before it was preempted
    PREEMPTED = 4  # it gave up its pages


class Cell(NamedTuple):
    """One request in one step. ``number`` is the request's; ``found`` tokens came from the cache, ``tokens`` were
    computed, or, of one that was preempted, lost; ``why`` it got no more (a ``Why``, or empty)."""

    lane: int
    number: int
    kind: int
    tokens: int
    found: int = 0
    why: str = ""


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
        used = {cell.number for seen in self.seen for cell in seen.cells}
        for number in [number for number in self.names if number not in used]:
            del self.names[number]
        for request in [request for request in self._lost if request.finished]:
            del self._lost[request]
        return [seen for seen in self.seen if seen.step > step]

    def lane(self, request: Request) -> int | None:
        """The lane that a request is followed in."""
        return self._lane_of.get(request)

    # ---- inside

    def _look(self, plan: Plan) -> tuple[list[Cell], tuple[int, int, int, int]]:
        """Cells of the requests that are followed; decoded, prefilled, again and found tokens of all."""
        cells = [cell for request in plan.preempted if (cell := self._preempted(request)) is not None]
        self._free_lanes()
        admitted, cuts = set(plan.admitted), plan.cuts
        decode = prefill = again = found = 0
        for request, start, count in zip(plan.requests, plan.starts, plan.counts, strict=True):
            kind, hit = Kind.DECODE, 0
            if start >= request.prefill_target:
                decode += count
            else:
                hit = start if request in admitted else 0
                repeated = min(count, max(0, self._lost[request] - start)) if request in self._lost else 0
                kind = Kind.AGAIN if repeated else Kind.HIT if hit else Kind.PREFILL
                found, again, prefill = found + hit, again + repeated, prefill + count - repeated
            lane = self._lane_of.get(request)
            if lane is None and (lane := self._take_lane(request)) is None:
                continue
            why = cuts.get(request.id) if cuts else None
            cells.append(Cell(lane, request.arrival_index, kind, count, hit, "" if why is None else why.value))
        return cells, (decode, prefill, again, found)

    def _preempted(self, request: Request) -> Cell | None:
        lost = self._computed(request)
        self._lost[request] = max(lost, self._lost.get(request, 0))
        lane = self._lane_of.pop(request, None)
        if lane is None:
            return None
        self._lanes[lane] = None
        return Cell(lane, request.arrival_index, Kind.PREEMPTED, lost)

    def _computed(self, request: Request) -> int:
        """How far a request had come before it was preempted, by the plans that are remembered."""
        for plan in reversed(self._plans):
            if request in plan.requests:
                row = plan.requests.index(request)
                return plan.starts[row] + plan.counts[row]
        return 0

    def _take_lane(self, request: Request) -> int | None:
        if request.finished or len(self._lane_of) == LANES:
            return None
        lane = self._lanes.index(None)
        self._lanes[lane] = request
        self._lane_of[request] = lane
        tenant = request.metadata.get("tenant")
        self.names[request.arrival_index] = (request.id, tenant if isinstance(tenant, str) else "", request.num_prompt)
        return lane

    def _free_lanes(self) -> None:
        for request, lane in [(request, lane) for request, lane in self._lane_of.items() if request.finished]:
            del self._lane_of[request]
            self._lanes[lane] = None


def _same(plan: Plan, before: Plan) -> bool:
    """Whether a plan that follows one which only decoded goes on with it."""
    return plan.requests == before.requests and plan.counts == before.counts and not (plan.preempted or plan.admitted)
