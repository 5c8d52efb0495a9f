"""Writes down what an engine core is asked, decides and brings about. Told by the core, on the engine's thread.

A step that decides the same as the one before, as most do, costs a few comparisons and six numbers: such steps become
one ``run``. Tokens are not looked at here: whoever takes a note out of the process makes digests of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.core.plan import Outcome, Plan
from engine.core.record import lines
from engine.core.record.facts import commit_line, plan_line, queue_of
from engine.core.record.lines import Line
from engine.core.record.notes import Begin, Finis, Note, Scribe
from engine.core.request import Finish, Request

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

LONGEST_RUN = 256  # steps
ROUND = 7  # digits of durations

Entry = bytes | Begin | Finis
"""A line: encoded, or to be encoded with digests."""


class Sink(Protocol):
    """Where a recorder's lines go. Never blocks."""

    def put(self, entry: Entry) -> None:
        """The next line. Mutates."""


class Half:
    """A plan that decided as the one before, and is not committed yet."""

    __slots__ = ("available", "evicted", "s", "step", "t")

    def __init__(self, step: int, t: float, s: float, available: int, evicted: int) -> None:
        self.step, self.t, self.s, self.available, self.evicted = step, t, s, available, evicted


class Recorder:
    """The record of one core from now on.

    Args:
        core: whose.
        scribe: makes the notes of requests.
        sinks: where lines go, each as it is complete.

    Attributes:
        live: notes of the requests that have not ended.
    """

    def __init__(self, core: EngineCore, scribe: Scribe, sinks: Sequence[Sink]) -> None:
        self._core, self._scribe = core, scribe
        self.sinks = list(sinks)
        self.live: dict[Request, Note] = {}
        self._numbers: dict[str, int] = {}
        self._deciding = False  # what happens now follows from what was recorded
        self._ended: list[Request] = []  # while something was decided
        self._last: Plan | None = None
        self._queue: list[int] = []
        self._parked = 0
        self._yield = 0
        self._output = core.counters.output_tokens
        self._half: Half | None = None
        self._run: lines.Run | None = None
        self._rested = False
        now = core.now()
        for request in sorted(core.requests.values(), key=lambda request: request.arrival_index):
            self._enter(request, scribe.before(request, now))

    # ---- what the core is asked

    def added(self, request: Request, deadline: float | None, parked: Collection[str]) -> None:
        """A request was accepted. Mutates."""
        self._enter(request, self._scribe.add(request, self._core.now(), deadline, parked))

    def readied(self, request_id: str, what: str) -> None:
        """What a parked request waits for is there. Mutates."""
        if not self._deciding and (number := self._numbers.get(request_id)) is not None:
            self._put(lines.Ready(number, what, self._core.now()))

    def aborted(self, request: Request, finish: Finish, detail: str | None) -> None:
        """A request is about to be ended from outside. Mutates."""
        if not self._deciding and request in self.live:
            words = detail or "" if finish is Finish.TIMEOUT else ""
            self._put(lines.Abort(request.arrival_index, self._core.now(), finish.value, words))

    def displaced(self, request: Request) -> None:
        """A request was ended to make room for one that then had none after all. Mutates."""
        self._put(lines.Abort(request.arrival_index, self._core.now(), Finish.ABORT.value))

    def failing(self, plan: Plan) -> None:
        """The oldest step in flight has failed. Mutates."""
        self._put(lines.Fail(plan.index, self._core.now()))

    def renamed(self, fingerprint: str) -> None:
        """The model has other weights. Mutates."""
        self._put(lines.Weights(self._core.now(), fingerprint))

    def flushed(self) -> None:
        """The prefix cache is about to forget everything. Mutates."""
        self._put(lines.Flush(self._core.now()))

    def idled(self) -> None:
        """Nothing is left to plan. Mutates."""
        run = self._run
        if run is not None and self._half is None and not self._rested and (run.idle or len(run.t) == 1):
            run.idle = self._rested = True
            return
        self._put(lines.Idle())

    # ---- what it decides

    def planning(self) -> None:
        """A step is about to be planned. Mutates."""
        self._deciding = True

    def planned(self, plan: Plan, began: float) -> None:
        """It was planned. Mutates."""
        core = self._core
        seconds, parked = core.clock.read() - began, len(core.parked)
        queue, available = queue_of(core), core.kv.available()
        last = self._last
        if self._half is not None or (self._run is not None and self._run.idle and not self._rested):
            self.settle()
        if last is not None and queue == self._queue and parked == self._parked and _same(plan, last):
            self._half = Half(plan.index, began, seconds, available, plan.evicted_pages)
        else:
            self.settle()
            self._queue, self._parked, self._yield = queue, parked, sum(plan.samples)
            line = plan_line(plan, self._numbers, queue, parked, available)
            line.t, line.s = began, round(seconds, ROUND)
            self._emit(line)
        self._last = plan
        self._decided()

    def committing(self) -> None:
        """An outcome is about to be applied. Mutates."""
        self._deciding = True

    def committed(self, outcome: Outcome, began: float) -> None:
        """It was applied. Mutates."""
        core, half = self._core, self._half
        seconds, output = core.clock.read() - began, core.counters.output_tokens
        yielded = None
        if not (outcome.dropped or outcome.errors or outcome.plan.drafts):
            yielded = output - self._output
        if half is not None and yielded == self._yield and not (outcome.finished or outcome.proposals):
            self._go_on(half, outcome.plan.index, began, seconds)
        else:
            line = commit_line(outcome, yielded)
            line.t, line.s = began, round(seconds, ROUND)
            self._put(line)
        self._output = output
        self._decided()

    def ended(self, request: Request) -> None:
        """A request has ended, and holds nothing any more. Mutates."""
        if self._deciding:
            self._ended.append(request)
        else:
            self._end(request)

    def settle(self) -> None:
        """Hand on what was held back in the hope that it goes on. Mutates."""
        run, self._run, half, self._half = self._run, None, self._half, None
        for each in [] if run is None else [run] if self._rested or not run.idle else _split(run):
            if not any(each.evicted):
                each.evicted = []
            self._emit(each)
        if half is not None:
            s = round(half.s, ROUND)
            self._emit(lines.Plan(half.step, half.t, s, evicted=half.evicted, available=half.available))

    def open_ends(self) -> list[Finis]:
        """What there is by now of the requests that have not ended. Does not mutate."""
        now = self._core.now()
        return [self._scribe.end(note, request, now) for request, note in self.live.items()]

    # ---- inside

    def _enter(self, request: Request, note: Note) -> None:
        self.settle()
        self.live[request] = note
        self._numbers[request.id] = request.arrival_index
        self._hand_on(Begin(note))

    def _end(self, request: Request) -> None:
        note = self.live.pop(request, None)
        if note is None:
            return
        self.settle()
        del self._numbers[request.id]
        self._hand_on(self._scribe.end(note, request, self._core.now()))

    def _decided(self) -> None:
        self._deciding = False
        if self._ended:
            ended, self._ended = self._ended, []
            for request in ended:
                self._end(request)

    def _put(self, line: Line) -> None:
        self.settle()
        self._emit(line)

    def _emit(self, line: Line) -> None:
        self._hand_on(lines.encode(line))

    def _hand_on(self, entry: Entry) -> None:
        for sink in self.sinks:
            sink.put(entry)

    def _go_on(self, half: Half, committed: int, began: float, seconds: float) -> None:
        """A step of the run was committed. Mutates."""
        run, lag = self._run, half.step - committed
        if run is None or run.lag != lag or len(run.t) >= LONGEST_RUN:
            self._half = None
            self.settle()
            run = self._run = lines.Run(half.step, [], [], [], [], [], [], lag)
        self._half, self._rested = None, False
        run.t.append(half.t)
        run.s.append(round(half.s, ROUND))
        run.available.append(half.available)
        run.evicted.append(half.evicted)
        run.ct.append(began)
        run.cs.append(round(seconds, ROUND))


def _split(run: lines.Run) -> list[lines.Run]:
    """A run whose last step was not followed by ``idle``, as the others were: that one for itself."""
    last = len(run.t) - 1
    return [_part(run, slice(None, last), run.step, idle=True), _part(run, slice(last, None), run.step + last)]


def _part(run: lines.Run, part: slice, step: int, *, idle: bool = False) -> lines.Run:
    return lines.Run(
        step,
        run.t[part],
        run.s[part],
        run.ct[part],
        run.cs[part],
        run.available[part],
        run.evicted[part],
        run.lag,
        idle,
    )


def _same(plan: Plan, last: Plan) -> bool:
    """Whether two plans in a row decide the same."""
    return (
        plan.requests == last.requests
        and plan.counts == last.counts
        and plan.samples == last.samples
        and not (plan.admitted or plan.preempted or plan.drafts or last.drafts)
        and plan.waits == last.waits
        and plan.otherwise is last.otherwise
        and plan.cuts == last.cuts
        and plan.mode == last.mode
    )
