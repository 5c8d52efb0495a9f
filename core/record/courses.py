"""What a log says of time: how long steps were computed, and when each request's tokens came."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.core.least_squares import nnls
from engine.core.record.lines import Commit, End, Fail, Plan
from engine.core.record.reading import DecisionLog

OUTLIERS = 0.01  # of the steps, the slowest, are left out
FEW = 8  # steps: with fewer, nothing is fitted


class Timed(NamedTuple):
    """One step that was computed.

    Attributes:
        rows, tokens: of its batch. context: tokens that its rows attend to, themselves included.
        seconds: for which it was computed. overhead: that planning it, applying its outcome, and what the engine did
            between the outcome before and it, took.
    """

    step: int
    rows: int
    tokens: int
    context: int
    seconds: float
    overhead: float


def timed(log: DecisionLog) -> Iterator[Timed]:
    """The steps of a log that were computed, with their times."""
    pending: list[tuple[Plan, int, float]] = []
    places: dict[int, int] = {}
    before, ended = -math.inf, math.inf  # when the last outcome was there, and when it was applied, if work was left
    for line in log.lines:
        match line:
            case Plan():
                pending.append((line, _context(line, places), max(0.0, line.t - ended)))
                ended = math.inf
            case Fail():
                pending.clear()
            case Commit() if pending:
                plan, context, gap = pending.pop(0)
                if plan.rows:
                    seconds = max(0.0, line.t - max(plan.t + plan.s, before))
                    overhead = gap + plan.s + line.s
                    yield Timed(plan.step, len(plan.rows), sum(plan.each), context, seconds, overhead)
                before, ended = line.t, line.t + line.s if plan.rows else math.inf


def _context(plan: Plan, places: dict[int, int]) -> int:
    """Tokens that the rows of a plan attend to. Mutates where each request is."""
    return sum(plan.begin(places)) + sum(plan.each)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that a step is computed: a constant, and so much a row, a token, and a token of context.

    ``overhead`` is what a step takes beside that. ``error``: the mean relative error over the steps that it was fitted
    to: all but the slowest, in which the machine did something else.
    """

    constant: float = 0.0
    row: float = 0.0
    token: float = 0.0
    context: float = 0.0
    overhead: float = 0.0
    error: float = 0.0
    steps: int = 0

    @classmethod
    def fit(cls, steps: Sequence[Timed]) -> StepTimes:
        """The best fit without negative parts. Raises ``ValueError`` where there are too few steps."""
        if len(steps) < FEW:
            raise ValueError(f"{len(steps)} steps were computed, and {FEW} at least are needed to fit their times")
        steps = sorted(steps, key=lambda step: step.seconds)[: math.ceil(len(steps) * (1 - OUTLIERS))]
        seconds = np.array([step.seconds for step in steps])
        parts = np.array([(1.0, step.rows, step.tokens, step.context) for step in steps])
        values = nnls(parts, seconds)
        overhead = float(np.median([step.overhead for step in steps]))
        error = float(np.abs(parts @ values - seconds).sum() / max(seconds.sum(), 1e-12))
        constant, row, token, context = map(float, values)
        return cls(constant, row, token, context, overhead, error, len(steps))

    def seconds(self, rows: int, tokens: int, context: int) -> float:
        """Of one step."""
        return self.constant + self.row * rows + self.token * tokens + self.context * context


@dataclass(slots=True)
class Courses:
    """When requests' tokens came, on one clock. Mutable: told of what happens, in order.

    Attributes:
        ttft: seconds from arrival to the first token, of each request that had one.
        itl: seconds between a request's tokens.
        ended: requests by how they ended.
    """

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    _last: dict[int, float] = field(default_factory=dict)

    def token(self, n: int, arrival: float, count: int, now: float) -> None:
        """Tokens of a request came. Mutates."""
        last = self._last.get(n)
        if last is None:
            self.ttft.append(now - arrival)
        else:
            self.itl.append(now - last)
        self.itl += [0.0] * (count - 1)
        self._last[n] = now

    def end(self, n: int, how: str) -> None:
        """A request has ended. Mutates."""
        self.ended[how] = self.ended.get(how, 0) + 1
        self._last.pop(n, None)

    def figures(self) -> dict[str, float]:
        """Means and percentiles, in seconds; what was never measured is left out."""
        found: dict[str, float] = {}
        for name, values in (("ttft", self.ttft), ("itl", self.itl)):
            if values:
                found[f"{name}_mean"] = float(np.mean(values))
                found |= {f"{name}_p{part}": float(np.percentile(values, part)) for part in (50, 99)}
        return found


def courses_of(log: DecisionLog) -> Courses:
    """As they were recorded."""
    courses, pending = Courses(), []
    arrivals = {n: add.t if add.arrival is None else add.arrival for n, add in log.adds.items()}
    for line in log.lines:
        match line:
            case Plan():
                pending.append(line)
            case Fail():
                pending.clear()
            case Commit() if pending:
                for n, count in _yields(pending.pop(0), line):
                    if count and n in arrivals:
                        courses.token(n, arrivals[n], count, line.t)
            case End() if line.finish:
                courses.end(line.n, line.finish)
    return courses


def _yields(plan: Plan, commit: Commit) -> Iterator[tuple[int, int]]:
    """Tokens that each row's request was given."""
    rows = plan.rows or []
    lost = {*commit.dropped, *commit.errors}
    silent = set(plan.partial)
    for row, n in enumerate(rows):
        count = int(row not in silent) if commit.tokens is None else commit.tokens[row]
        yield n, 0 if row in lost else count


def totals_of(log: DecisionLog) -> dict[str, int]:
    """Counts over a log: what was computed again, found in the cache, preempted, evicted."""
    places: dict[int, int] = {}
    recomputed = cached = preempted = evicted = computed = 0
    for line in log.lines:
        if isinstance(line, Plan):
            recomputed += sum(places.get(n, 0) for n in line.preempted)
            preempted += len(line.preempted)
            cached += sum(max(0, hit) for _, hit in line.admitted)
            evicted += line.evicted
            computed += sum(line.each)
            line.begin(places)
    return {
        "recomputed_tokens": recomputed,
        "cached_tokens": cached,
        "computed_tokens": computed,
        "preemptions": preempted,
        "evicted_pages": evicted,
    }
