"""What another plugin or option would have changed: the requests of a log on other engines, in simulated time.

Requests come when they came and want what they wanted (as many tokens, the same prefixes); clients leave when they did.
Steps take as long as a model fitted to the log's steps says. The recorded plugins are run in the same way beside the
others, so that both are measured alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from engine.core.errors import EngineError, InvalidRequest, QueueFull
from engine.core.plan import Delta, Outcome, Plan
from engine.core.record.courses import Courses, StepTimes, courses_of, timed, totals_of
from engine.core.record.lines import Abort, Add, AnyLine, Flush, Ready
from engine.core.record.reading import DecisionLog
from engine.core.replay.cores import NotComputed
from engine.core.replay.log import STOP, Cast, Setup, Time, some_vectors
from engine.core.replay.report import NotReplayable
from engine.core.request import Finish, Request

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


class Paced(NotComputed):
    """Answers as recorded, each step after as long as steps are said to take. Sets the engine's clock.

    In overlap mode the device goes on with the next step as soon as it has one, while the host plans.
    """

    overlaps, threaded = True, False

    def __init__(self, time: Time, times: StepTimes, says: Callable[[Request], int]) -> None:
        super().__init__()
        self._time, self._times, self._says = time, times, says
        self._free = 0.0  # when the device has computed all that it was given

    def launch(self, plan: Plan) -> Callable[[], Outcome]:
        """Planning took its time; the device begins as soon as it is free."""
        time, times = self._time, self._times
        time.now += times.overhead
        context = sum(map(int.__add__, plan.starts, plan.counts))
        self._free = max(time.now, self._free) + times.seconds(len(plan.requests), plan.total_tokens, context)
        return partial(self._answer, plan, self._free)

    def execute(self, plan: Plan) -> Outcome:
        """Launch it, and wait."""
        return self.launch(plan)()

    def _answer(self, plan: Plan, done: float) -> Outcome:
        self._time.now = max(self._time.now, done)
        rows = zip(plan.requests, plan.samples, strict=True)
        said = [(self._says(request),) if samples else () for request, samples in rows]
        return Outcome(plan, said, pooled=some_vectors(plan))


class World:
    """One engine, its clients and its clock."""

    def __init__(self, log: DecisionLog, setup: Setup, times: StepTimes) -> None:
        self._cast = Cast(log)
        self._time = Time(log.header.time)
        self._ids = {add.n: add.id for add in log.adds.values()}
        self._numbers = {add.id: add.n for add in log.adds.values()}
        # Where not all is told, what somebody waited for may have come before: it is there if it is not said to come.
        said = {(line.n, line.what) for line in log.lines if isinstance(line, Ready)}
        self._readied = said if log.inexact else None
        self._coming = list(_events(log))
        heapq.heapify(self._coming)
        self._courses = Courses()
        self._arrivals: dict[int, float] = {}
        self.core = setup.core(self._time, Paced(self._time, times, self._said))

    def run(self) -> Figures:
        """All of it."""
        core, time, began, idle = self.core, self._time, self._time.now, 0
        while self._coming or core.has_work:
            self._deliver()
            if not core.has_work:
                if not self._coming:
                    break
                time.now = max(time.now, self._coming[0][0])
                continue
            before = time.now
            self._tell(core.step())
            if time.now > before or core.last_plan:
                idle = 0
                continue
            time.now = min(before + core.rest, self._coming[0][0]) if self._coming else before + core.rest
            idle += 1
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
        return Figures(time.now - began, self._courses.figures(), totals, self._courses.ended)

    def _said(self, request: Request) -> int:
        """The next token of a request. Its last one ends it where it ended, unless it ended by its length."""
        n = self._numbers[request.id]
        end, known = self._cast.ends.get(n), len(request.tokens)
        if end is not None and request.num_output + 1 == max(1, end.output) and end.finish in ("stop", "error", ""):
            return STOP
        return self._cast.more(n, known + 1)[known]

    def _tell(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
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
        self._tell(self.core.take_deltas())

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
