"""What another plugin or option would have changed: the requests of a log on other engines, in simulated time.

Requests come when they came and want what they wanted (as many tokens, the same prefixes); clients leave when they did.
Steps take as long as a model fitted to the log's steps says. The recorded plugins are run in the same way beside the
others, so that both are measured alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from engine.core.errors import EngineError, InvalidRequest, QueueFull
from engine.core.plan import Outcome
from engine.core.plan import Plan as Planned
from engine.core.record.courses import Courses, StepTimes, courses_of, timed, totals_of
from engine.core.record.lines import Abort, Add, AnyLine, Flush, Ready
from engine.core.record.reading import DecisionLog
from engine.core.replay.log import STOP, Cast, Setup, Time, some_vectors
from engine.core.replay.report import NotReplayable
from engine.core.request import Finish, Request

REST = 0.001  # seconds until the next look, where a step brought nothing
STUCK = 100_000  # steps without a token or an end


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in numbers: seconds of TTFT and ITL, counts, and how requests ended."""

    seconds: float
    times: dict[str, float]
    totals: dict[str, int]
    ended: dict[str, int]

    @classmethod
    def recorded(cls, log: DecisionLog) -> Figures:
        """As it was."""
        plans, courses = log.plans, courses_of(log)
        seconds = plans[-1].t - plans[0].t if plans else 0.0
        return cls(seconds, courses.figures(), totals_of(log), courses.ended)


def fitted(log: DecisionLog) -> StepTimes:
    """Step times of a log. Raises ``NotReplayable`` where it has too few steps."""
    try:
        return StepTimes.fit(list(timed(log)))
    except ValueError as error:
        raise NotReplayable(str(error)) from error


def simulate(log: DecisionLog, setup: Setup, times: StepTimes) -> Figures:
    """The requests of a log on another engine.

    Raises:
        NotReplayable: the plugins cannot be made, or the engine does not come to an end.
    """
    world = World(log, setup, times)
    try:
        return world.run()
    except EngineError as error:
        raise NotReplayable(f"the engine stopped after {world.core.counters.steps} steps: {error}") from error
    finally:
        world.core.close()


class World:
    """One engine, its clients and its clock."""

    def __init__(self, log: DecisionLog, setup: Setup, times: StepTimes) -> None:
        self._cast, self._times = Cast(log), times
        self._time = Time(log.header.time)
        self._ids = {add.n: add.id for add in log.adds.values()}
        self._numbers = {add.id: add.n for add in log.adds.values()}
        # Where not all is told, what somebody waited for may have come before: it is there if it is not said to come.
        said = {(line.n, line.what) for line in log.lines if isinstance(line, Ready)}
        self._readied = said if log.inexact else None
        self._coming = list(_events(log))
        heapq.heapify(self._coming)
        self._flying: list[tuple[Planned, float]] = []  # plans, and when each is computed
        self._courses = Courses()
        self._arrivals: dict[int, float] = {}
        self.core = setup.core(self._time)

    def run(self) -> Figures:
        """All of it."""
        core, began, idle = self.core, self._time.now, 0
        while self._coming or core.has_work:
            self._deliver()
            if not (core.running or len(core.waiting) or self._flying):
                if not self._coming:
                    break
                self._time.now = max(self._time.now, self._coming[0][0])
                continue
            moved = self._step()
            idle = 0 if moved else idle + 1
            if idle > STUCK:
                raise NotReplayable(f"nothing moved for {STUCK} steps")
        counters = core.counters
        totals = {
            "recomputed_tokens": counters.recomputed_tokens,
            "cached_tokens": counters.cached_tokens,
            "computed_tokens": counters.computed_tokens,
            "preemptions": counters.preemptions,
            "evicted_pages": counters.evicted_pages,
        }
        return Figures(self._time.now - began, self._courses.figures(), totals, self._courses.ended)

    # ---- the engine

    def _step(self) -> bool:
        """Plan, and commit what is computed by then. False where nothing came of it."""
        core, time, times = self.core, self._time, self._times
        for request, words in core.timeouts.due(time.now):
            core.abort(request.id, Finish.TIMEOUT, words)
        core.keep_time()
        before = self._flying[0] if self._flying else None
        plan = core.plan()
        time.now += times.overhead
        if plan:
            start = max(time.now, before[1] if before is not None else 0.0)
            context = sum(map(int.__add__, plan.starts, plan.counts))
            self._flying.append((plan, start + times.seconds(len(plan.requests), plan.total_tokens, context)))
        else:
            self._flying.append((plan, time.now))
        if before is not None:
            self._commit()
        if self._flying and self._flying[0][0] is plan and not (plan and core.flight.overlap):
            self._commit()
        if not (core.running or len(core.waiting) or self._flying):
            core.idle()
        self._tell()
        if not plan and before is None:
            time.now = min(time.now + REST, self._coming[0][0]) if self._coming else time.now + REST
        return bool(plan) or before is not None

    def _commit(self) -> None:
        plan, done = self._flying.pop(0)
        self._time.now = max(self._time.now, done)
        said = [
            self._said(request) if samples else () for request, samples in zip(plan.requests, plan.samples, strict=True)
        ]
        self.core.commit(Outcome(plan, said, pooled=some_vectors(plan)))

    def _said(self, request: Request) -> tuple[int]:
        """The next token of a request. Its last one ends it where it ended, unless it ended by its length."""
        n = self._numbers[request.id]
        end, known = self._cast.ends.get(n), len(request.tokens)
        if end is not None and request.num_output + 1 == max(1, end.output) and end.finish in ("stop", "error", ""):
            return (STOP,)
        return (self._cast.more(n, known + 1)[known],)

    def _tell(self) -> None:
        for delta in self.core.take_deltas():
            n = self._numbers[delta.request_id]
            if delta.tokens:
                self._courses.token(n, self._arrivals[n], len(delta.tokens), self._time.now)
            if delta.finish is not None:
                self._courses.end(n, delta.finish.value)

    # ---- its clients

    def _deliver(self) -> None:
        while self._coming and self._coming[0][0] <= self._time.now:
            _, _, line = heapq.heappop(self._coming)
            match line:
                case Add():
                    self._add(line)
                case Abort() if line.finish == Finish.ABORT.value:
                    self.core.abort(self._ids[line.n])
                case Ready():
                    self.core.ready(self._ids[line.n], line.what)
                case Flush():
                    self.core.cache.flush()
        self._tell()

    def _add(self, add: Add) -> None:
        tokens, params, more = self._cast.arguments(add)
        if self._readied is not None:
            more["parked_on"] = [what for what in add.parked if (add.n, what) in self._readied]
        self._arrivals[add.n] = more["arrival"]
        try:
            self.core.add(tokens, params, **more)
        except QueueFull:
            self._courses.end(add.n, "refused")
        except InvalidRequest as error:
            raise NotReplayable(f"request {add.id} is impossible there: {error}") from error


def _events(log: DecisionLog) -> Iterator[tuple[float, int, AnyLine]]:
    numbers: count[int] = count()
    for line in log.lines:
        if isinstance(line, Add):
            yield line.t if line.arrival is None else min(line.t, line.arrival), next(numbers), line
        elif isinstance(line, Abort | Ready | Flush):
            yield line.t, next(numbers), line


def names(figures: Sequence[Figures]) -> list[str]:
    """Names of all numbers that any of them has, in order."""
    found: dict[str, None] = {}
    for one in figures:
        found |= dict.fromkeys([*one.times, *one.totals])
    return list(found)
