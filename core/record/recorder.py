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
from engine.core.record.told import Told
from engine.core.request import Finish, Request

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

LONGEST_RUN = 256  # steps
ROUND = 7  # digits of durations

NOBODY: list[int] = []

Half = tuple[int, float, float, int, int]
"""A plan that decided as the one before and is not committed yet: number, when, how long, pages available, evicted."""
Step = tuple[int, float, float, int, int, float, float]
"""The same, and when and for how long it was committed."""
Entry = bytes | Begin | Finis
"""A line: encoded, or to be encoded with digests."""


class Sink(Protocol):
    """Where a recorder's lines go. Never blocks."""

    def put(self, entry: Entry) -> None:
        """The next line. Mutates."""


class Recorder(Told):
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
        self._ended: list[Request] = []  # while something was decided
        self._last: Plan | None = None
        self._queue: list[int] = []
        self._parked = 0
        self._yield = 0
        self._output = core.counters.output_tokens
        self._half: Half | None = None
        self._run: list[Step] = []
        self._lag, self._idle = 0, False
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
        if not self.deciding and (number := self._numbers.get(request_id)) is not None:
            self._put(lines.Ready(number, what, self._core.now()))

    def aborted(self, request: Request, finish: Finish, detail: str | None) -> None:
        """A request is about to be ended from outside. Mutates."""
        if not self.deciding and request in self.live:
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

    def expired(self) -> None:
        """The prefix cache forgets what was for a time that is over. Mutates."""
        self._put(lines.Expire(self._core.now()))

    def interrupted(self) -> None:
        """Something struck in the middle of a step: what follows does not follow from what was recorded. Mutates."""
        self.deciding = False
        self._put(lines.Gap(0, "the engine was interrupted in the middle of a step"))

    def idled(self) -> None:
        """Nothing is left to plan. Mutates."""
        if self._run and self._half is None and not self._rested and (self._idle or len(self._run) == 1):
            self._idle = self._rested = True
        else:
            self._put(lines.Idle())

    # ---- what it decides

    def planned(self, plan: Plan, began: float) -> None:
        """A step was planned. Mutates."""
        core, last = self._core, self._last
        seconds, roster = core.clock.read() - began, core.roster
        queue = queue_of(core) if roster.waiting else NOBODY
        parked, available = len(roster.parked), core.kv.available()
        if self._half is not None or (self._idle and not self._rested):
            self.settle()
        if last is not None and queue == self._queue and parked == self._parked and _same(plan, last):
            self._half = (plan.index, began, seconds, available, plan.evicted_pages)
        else:
            self.settle()
            self._queue, self._parked, self._yield = queue, parked, sum(plan.samples)
            line = plan_line(plan, self._numbers, queue, parked, available)
            line.t, line.s = began, round(seconds, ROUND)
            self._emit(line)
        self._last = plan
        self.deciding = False
        if self._ended:
            self._end_all()

    def committed(self, outcome: Outcome, began: float) -> None:
        """An outcome was applied. Mutates."""
        core, half = self._core, self._half
        seconds, output, plan = core.clock.read() - began, core.counters.output_tokens, outcome.plan
        yielded = None
        if not (outcome.dropped or outcome.errors or plan.drafts):
            yielded = output - self._output
        if half is not None and yielded == self._yield and not (outcome.finished or outcome.proposals):
            run, lag = self._run, half[0] - plan.index
            if not run or self._lag != lag or len(run) >= LONGEST_RUN:
                self._half = None
                self.settle()
                run, self._lag = self._run, lag
            self._half, self._rested = None, False
            run.append((*half, began, seconds))
        else:
            line = commit_line(outcome, yielded)
            line.t, line.s = began, round(seconds, ROUND)
            self._put(line)
        self._output = output
        self.deciding = False
        if self._ended:
            self._end_all()

    def ended(self, request: Request) -> None:
        """A request has ended, and holds nothing any more. Mutates."""
        if self.deciding:
            self._ended.append(request)
        else:
            self._end(request)

    def settle(self) -> None:
        """Hand on what was held back in the hope that it goes on. Mutates."""
        run, half = self._run, self._half
        if run:
            self._run, whole = [], self._rested or not self._idle
            # Where the last step was not followed by ``idle``, as the others were, it is a run for itself.
            for part in [run] if whole else [run[:-1], run[-1:]]:
                self._emit(_as_line(part, self._lag, self._idle and (whole or part[-1] is not run[-1])))
            self._idle = False
        if half is not None:
            self._half = None
            step, t, s, available, evicted = half
            self._emit(lines.Plan(step, t, round(s, ROUND), evicted=evicted, available=available))

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

    def _end_all(self) -> None:
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


def _as_line(run: list[Step], lag: int, idle: bool) -> lines.Run:
    steps, t, s, available, evicted, ct, cs = zip(*run, strict=True)
    return lines.Run(
        steps[0], t, [round(value, ROUND) for value in s], ct, [round(value, ROUND) for value in cs], available,
        evicted if any(evicted) else (), lag, idle,
    )  # fmt: skip


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
