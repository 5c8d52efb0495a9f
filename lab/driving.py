"""An open loop: requests of a workload are sent when it says, however slowly those before are answered.

    arrival ─▶ prepared ahead ─▶ sent at its time ─▶ target (engine or server) ─▶ times of tokens, end ─▶ followers

What is counted is counted from the time at which a request was due, not from when it was really sent: a client that is
late, or a server that lets nobody in, cannot make its own delay disappear. Source: "coordinated omission" (Tene, 2013).
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.lab.arrivals import Arrival, Workload, seed_of
from engine.lab.following import SKIPPED, Following
from engine.lab.measured import GOOD, Timed, spread, timed_gaps

AHEAD = 512  # requests that are prepared before they are due
LEAD = 0.05  # seconds between the beginning and the first request
TICK = 0.05  # seconds between two looks at how late the loop itself is
SLEEP_SLACK = 0.0015  # seconds that a loop may sleep too long: this last bit is waited for without sleeping

Progress = Callable[[int, int, float], None]
"""Told now and then: requests that have ended, all requests, seconds since the start."""


@dataclass(slots=True)
class Answer:
    """How a request went, as a target tells it. Times are ``time.perf_counter``'s.

    Attributes:
        times: when tokens came; several that came together count once.
        tokens: how many came in all.
        finish, detail: as in ``Timed``.
        ended: when it was over.
        prompt: tokens of its prompt.
        cached: tokens of the prompt that the prefix cache gave, where that is told.
        preemptions: how often it lost its pages, where that is told.
        waited: seconds to its first start, by the engine's own clock; ``None``: it does not tell.
        said: what whoever continues it begins with, as the target understands it.
    """

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    finish: str = "error"
    detail: str | None = None
    ended: float = 0.0
    prompt: int = 0
    cached: int = 0
    preemptions: int = 0
    waited: float | None = None
    said: Any = None


class Books:
    """What came of the requests of a run, one after the other.

    Args:
        began: when the run did, on the clock of the answers' times.

    Attributes:
        requests: those that have ended.
    """

    def __init__(self, began: float) -> None:
        self._began = self._last = began
        self.requests: list[Timed] = []
        self._gaps: list[NDArray[np.float32]] = []
        self._tokens = self._chunks = 0

    def enter(self, arrival: Arrival, answer: Answer, due: float, late: float | None = None) -> None:
        """A request has ended that was due then, and was sent so late. Mutates."""
        gaps, own = timed_gaps(answer.times, answer.tokens)
        self._gaps.append(gaps)
        self._tokens += answer.tokens
        self._chunks += len(answer.times)
        self._last = max(self._last, answer.ended)
        self.requests.append(
            Timed(
                id=arrival.id, tenant=arrival.tenant, arrival=due - self._began, prompt=answer.prompt,
                output=answer.tokens, finish=answer.finish, detail=answer.detail,
                queue=None if answer.waited is None else (late or 0.0) + answer.waited,
                ttft=answer.times[0] - due if answer.times else None, e2e=answer.ended - due, cached=answer.cached,
                preemptions=answer.preemptions, late=late, tpot=own.get("tpot"), itl=own.get("itl"),
                stall=own.get("stall"),
            )
        )  # fmt: skip

    def seconds(self, first: float) -> float:
        """From an arrival to the last end."""
        return max(self._last - self._began - first, 0.0)

    @property
    def gaps(self) -> NDArray[np.float32]:
        """Between tokens, of all requests."""
        return np.concatenate(self._gaps) if self._gaps else np.empty(0, np.float32)

    @property
    def tokens_a_chunk(self) -> float:
        """Tokens that came in one piece, in the mean."""
        return self._tokens / self._chunks if self._chunks else 1.0


class Target(ABC):
    """Who answers. Its methods are called in one event loop."""

    @abstractmethod
    def prepare(self, arrival: Arrival, said: Any) -> Any:
        """All that can be done before the request is due, such as its body. ``said``: of the one that it continues."""

    @abstractmethod
    async def ask(self, arrival: Arrival, prepared: Any, keep: bool) -> Answer:
        """Send it, wait for its end. Raises nothing that is the server's fault.

        Args:
            keep: somebody continues it: ``said`` is wanted.
        """


class Client(NamedTuple):
    """How the client itself did, which is to say how far the rest is to be believed.

    Attributes:
        late: from when requests were due to when they were sent, in seconds: mean, percentiles, the longest.
        lag: by how much the client's event loop was late for its own alarms.
        cpu_share: CPU seconds of the client's process a second, of one core.
        most_open: most requests that were open at once.
        tokens_a_chunk: tokens that came in one piece, in the mean.
        ttft: of the median request: what is late is late beside that.
    """

    late: dict[str, float | None]
    lag: dict[str, float | None]
    cpu_share: float
    most_open: int
    tokens_a_chunk: float
    ttft: float = 0.0

    @property
    def doubts(self) -> list[str]:
        """Why its figures are not to be trusted; empty: no reason was seen."""
        found, most = [], max(MOST_LATE, MOST_SHARE * self.ttft)
        if (late := self.late["p99"] or 0.0) > most:
            found.append(f"1% of the requests were sent {late * 1e3:.0f} ms late or more")
        if (lag := self.lag["p99"] or 0.0) > most:
            found.append(f"the client's event loop lagged behind by {lag * 1e3:.0f} ms or more in 1% of the time")
        if self.cpu_share > MOST_CPU:
            found.append(f"the client used {self.cpu_share:.0%} of a core")
        return found


MOST_LATE, MOST_SHARE, MOST_CPU = 0.02, 0.05, 0.9


class Driven(NamedTuple):
    """What came of a drive; ``seconds`` from the first arrival to the last end."""

    requests: tuple[Timed, ...]
    gaps: NDArray[np.float32]
    seconds: float
    client: Client
    wall: float
    cpu: float


async def drive(target: Target, workload: Workload, *, progress: Progress | None = None) -> Driven:
    """Run a workload against a target, in an open loop.

    Raises:
        What the target raises first that is nobody's answer, such as ``EngineDead``: all requests are given up then.
    """
    try:
        return await _Drive(target, workload, progress).run()
    except BaseExceptionGroup as group:
        raise _first(group) from group


def _first(error: BaseException) -> BaseException:
    """Of a group of errors, the first."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def warm(target: Target, workload: Workload, count: int) -> None:
    """Send ``count`` requests like the workload's first ones, with other tokens, all at once; nobody counts them."""
    if chosen := warming(workload, count):
        await drive(target, chosen)


def warming(workload: Workload, count: int) -> Workload | None:
    """``count`` requests like the workload's first, at once, that share no token with it; ``None``: there are none."""
    chosen = []
    for number, one in enumerate(one for one in workload if not one.after):
        if number == count:
            break
        pieces = tuple(piece._replace(seed=seed_of("warm-up", piece.seed)) for piece in one.prompt)
        chosen.append(replace(one, id=f"warm-{number}", at=0.0, prompt=pieces, deadline=None))
    return Workload(chosen, "warm-up") if chosen else None


class _Drive:
    """One run."""

    def __init__(self, target: Target, workload: Workload, progress: Progress | None) -> None:
        self._target, self._workload, self._progress = target, workload, progress
        self._following = Following(workload)
        self._late: list[float] = []
        self._lag: list[float] = []
        self._open = self._most = 0

    async def run(self) -> Driven:
        roots = self._following.roots
        ready = deque(self._target.prepare(one, None) for one in roots[:AHEAD])
        wait, cpu = time.perf_counter(), time.process_time()
        self._began = wait + LEAD
        self._books = Books(self._began)
        first = roots[0].at if roots else 0.0
        async with asyncio.TaskGroup() as around:
            watch = around.create_task(self._watch())
            async with asyncio.TaskGroup() as self._group:
                await self._send(roots, ready)
            watch.cancel()
        self._tell()
        books = self._books
        return Driven(
            tuple(books.requests), books.gaps, books.seconds(first), self._client(wait, cpu),
            time.perf_counter() - wait, time.process_time() - cpu,
        )  # fmt: skip

    async def _send(self, roots: list[Arrival], ready: deque[Any]) -> None:
        waiting = deque(roots[AHEAD:])
        for one in roots:
            due = self._began + one.at
            await _until(due)
            self._group.create_task(self._ask(one, ready.popleft(), due))
            if waiting:
                ready.append(self._target.prepare(waiting.popleft(), None))

    async def _ask(self, arrival: Arrival, prepared: Any, due: float) -> None:
        self._open += 1
        self._most = max(self._most, self._open)
        sent = time.perf_counter()
        answer = await self._target.ask(arrival, prepared, self._following.continued(arrival.id))
        self._open -= 1
        self._end(arrival, answer, due, sent)

    def _end(self, arrival: Arrival, answer: Answer, due: float, sent: float | None) -> None:
        late = None if sent is None else sent - due
        if late is not None:
            self._late.append(late)
        self._books.enter(arrival, answer, due, late)
        self._tell()
        ended = answer.ended
        self._following.ended(
            arrival, (answer.said or ()) if answer.finish in GOOD else None,
            come=lambda one: self._come(one, ended + one.at),
            skip=lambda one: self._end(one, Answer(finish="skipped", detail=SKIPPED, ended=ended), ended, None),
        )  # fmt: skip

    def _come(self, follower: Arrival, due: float) -> None:
        self._group.create_task(self._later(follower, due))

    async def _later(self, follower: Arrival, due: float) -> None:
        prepared = self._target.prepare(follower, self._following.begin(follower))
        await _until(due)
        await self._ask(follower, prepared, due)

    async def _watch(self) -> None:
        """How late the event loop is for an alarm: as late are the times of tokens."""
        while True:
            due = time.perf_counter() + TICK
            await asyncio.sleep(TICK)
            self._lag.append(max(0.0, time.perf_counter() - due))
            self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(len(self._books.requests), len(self._workload), max(0.0, time.perf_counter() - self._began))

    def _client(self, wall: float, cpu: float) -> Client:
        share = (time.process_time() - cpu) / max(time.perf_counter() - wall, 1e-9)
        books = self._books
        ttft = spread(one.ttft for one in books.requests if one.ttft is not None)["p50"] or 0.0
        return Client(spread(self._late), spread(self._lag), share, self._most, books.tokens_a_chunk, ttft)


async def _until(due: float) -> None:
    """Sleep until then. The last bit is spent turning over: a loop sleeps to the next millisecond."""
    while (left := due - time.perf_counter()) > 0:
        await asyncio.sleep(left - SLEEP_SLACK if left > SLEEP_SLACK else 0)
