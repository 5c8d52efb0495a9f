"""A workload on a real engine in this program: ``measure(LLM(...), workload)``, or an ``AsyncEngine``."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Protocol

from engine.core.errors import EngineError, InvalidRequest, QueueFull
from engine.core.loop import EngineCore
from engine.core.plan import Delta
from engine.core.request import Request, SamplingParams
from engine.core.serve.asks import Ask
from engine.core.serve.client import AsyncEngine
from engine.lab.arrivals import Arrival, Workload, tokens_of
from engine.lab.driving import Answer, Books, Client, Progress, Target, drive, warm, warming
from engine.lab.following import SKIPPED, Following
from engine.lab.measured import GOOD, spread
from engine.lab.replica import Used
from engine.lab.results import Results

SPECIAL = 100  # the first ids of a vocabulary are its special tokens: none is in made-up prompts
COUNTED = ("cached_tokens", "recomputed_tokens", "preemptions", "evicted_pages", "failed_steps")


class Stepped(Protocol):
    """An engine that is stepped by hand, such as ``LLM``."""

    @property
    def core(self) -> EngineCore:
        """What is stepped."""


def measure(
    engine: Stepped | AsyncEngine,
    workload: Workload,
    *,
    warm_up: int = 0,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Results:
    """Run a workload on a real engine, in an open loop, in real time.

    An ``LLM`` is stepped here, in this thread: what comes during a step is queued after it, as in a server, and counts
    from when it was due. An ``AsyncEngine`` steps by itself; it must not be in use in another event loop.

    Args:
        warm_up: so many requests like the first, with other tokens, come before, and are not counted.
        timeout: seconds after which a request is given up; it ends with ``timeout``.

    Raises:
        EngineError: the engine died. What it refuses is told in the results.
    """
    if isinstance(engine, AsyncEngine):
        return asyncio.run(measure_async(engine, workload, warm_up=warm_up, timeout=timeout, progress=progress))
    core = engine.core
    if (first := warming(workload, warm_up)) is not None:
        _Stepping(core, first, timeout, None).run()
    return _Stepping(core, workload, timeout, progress).run()


async def measure_async(
    engine: AsyncEngine, workload: Workload, *, warm_up: int = 0, timeout: float | None = None,
    progress: Progress | None = None,
) -> Results:  # fmt: skip
    """``measure`` within an event loop. Arguments and errors are those."""
    target = EngineTarget(engine, timeout)
    await warm(target, workload, warm_up)
    before = await engine.measures()
    driven = await drive(target, workload, progress=progress)
    client = driven.client if engine.pid is not None else driven.client._replace(cpu_share=0.0)  # it was the engine
    after = await engine.measures()
    busy = after.histograms["step_seconds"].total - before.histograms["step_seconds"].total
    rows = None  # how many its steps had is not on its books
    used = _used(before.values, after.values, driven.seconds, busy, rows, engine.limits.num_pages)
    return Results(
        workload=workload.name, requests=driven.requests, gaps=driven.gaps, seconds=driven.seconds, engines=(used,),
        wall=driven.wall, cpu=driven.cpu, about=about(engine.description), client=client,
    )  # fmt: skip


def about(description: dict[str, Any]) -> dict[str, Any]:
    """What was measured: of an engine's description, what shapes it."""
    return {name: description[name] for name in ("model", "plugins", "limits", "loop") if name in description}


def _params(output: int) -> SamplingParams:
    return SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)


def made_up(arrival: Arrival, before: Sequence[int], vocab: int) -> list[int]:
    """The prompt: what it continues, and its own made-up tokens."""
    return [*before, *tokens_of(arrival.prompt, vocab, SPECIAL if vocab > 10 * SPECIAL else 0)]


class EngineTarget(Target):
    """An engine of this program, in a thread or a process of its own."""

    def __init__(self, engine: AsyncEngine, timeout: float | None = None) -> None:
        self._engine, self._timeout = engine, timeout

    def prepare(self, arrival: Arrival, said: Any) -> Ask:
        """The ask."""
        tokens = made_up(arrival, said or (), self._engine.limits.vocab_size)
        return Ask(
            tokens=tokens, params=_params(arrival.output), priority=arrival.priority, metadata=arrival.metadata,
            deadline=arrival.deadline, request_id=arrival.id,
        )  # fmt: skip

    async def ask(self, arrival: Arrival, prepared: Ask, keep: bool) -> Answer:
        """Submit it, read its stream. Raises ``EngineDead``."""
        answer, said = Answer(prompt=len(prepared.tokens)), list(prepared.tokens)
        try:
            group = self._engine.submit_many([prepared])
        except (InvalidRequest, QueueFull) as error:
            answer.finish, answer.detail, answer.ended = "refused", str(error), time.perf_counter()
            return answer
        try:
            async with asyncio.timeout(self._timeout):
                async for _, chunk in group:
                    if chunk.token_ids:
                        answer.times.append(time.perf_counter())
                        answer.tokens += len(chunk.token_ids)
                        said.extend(chunk.token_ids)
                    answer.cached = chunk.cached_tokens
                    if chunk.finish_reason is not None:
                        answer.finish, answer.detail = chunk.finish_reason, chunk.detail
        except TimeoutError:
            answer.finish, answer.detail = "timeout", "the client gave it up"
        except InvalidRequest as error:  # the core itself has refused it
            answer.finish, answer.detail = "refused", str(error)
        finally:
            group.abort()
        answer.ended, answer.waited = time.perf_counter(), group.streams[0].course.waited
        answer.said = said if keep else None
        return answer


def _used(
    before: Mapping[str, int | float], after: Mapping[str, int | float], seconds: float, busy: float,
    rows_a_step: float | None, pages: int,
) -> Used:  # fmt: skip
    """What an engine did between two looks at its books."""
    did = {name: int(after[name] - before[name]) for name in (*COUNTED, "steps", "computed_tokens")}
    return Used(
        "engine", seconds, busy, did["steps"], did["computed_tokens"], rows_a_step, pages,
        **{name: did[name] for name in COUNTED},
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class _Open:
    """A request under way, and what has come of it."""

    arrival: Arrival
    due: float
    request: Request
    answer: Answer


class _Stepping:
    """A core stepped by hand through a workload. Times are its clock's, from the start on."""

    def __init__(self, core: EngineCore, workload: Workload, timeout: float | None, progress: Progress | None) -> None:
        self._core, self._workload, self._timeout, self._progress = core, workload, timeout, progress
        self._due: list[tuple[float, int, Arrival]] = []
        self._following = Following(workload)
        self._numbers = itertools.count()
        for one in self._following.roots:
            self._plan(one, one.at)
        self._prompts: dict[str, list[int]] = {}  # made before they are due
        self._open: dict[str, _Open] = {}
        self._books = Books(0.0)
        self._busy = 0.0
        self._steps = self._rows = self._most = 0

    def run(self) -> Results:
        core, books, wall, cpu = self._core, self._books, time.perf_counter(), time.process_time()
        for _, _, one in sorted(self._due):
            self._prompts[one.id] = made_up(one, (), core.limits.vocab_size)
        before, first, self._began = core.stats(), self._due[0][0] if self._due else 0.0, core.now()
        while self._due or self._open:
            self._arrive()
            if core.has_work:
                self._step()
            elif self._due:
                time.sleep(max(0.0, self._due[0][0] - self._now()))
            elif self._open:
                raise EngineError(f"{len(self._open)} requests are open, but the engine has no work")
        seconds, rows = books.seconds(first), self._rows / self._steps if self._steps else 0.0
        used = _used(before, core.stats(), seconds, self._busy, rows, core.pool.num_pages)
        return Results(
            workload=self._workload.name, requests=tuple(books.requests), gaps=books.gaps, seconds=seconds,
            engines=(used,), wall=time.perf_counter() - wall, cpu=time.process_time() - cpu,
            about=about(core.describe()), client=Client(spread(()), spread(()), 0.0, self._most, books.tokens_a_chunk),
        )  # fmt: skip

    def _now(self) -> float:
        return self._core.now() - self._began

    def _arrive(self) -> None:
        """Queue all that is due."""
        while self._due and self._due[0][0] <= (now := self._now()):
            due, _, one = heappop(self._due)
            tokens = self._prompts.pop(one.id, None)
            if tokens is None:
                tokens = made_up(one, self._following.begin(one) or (), self._core.limits.vocab_size)
            patience = [limit for limit in (one.deadline, self._timeout) if limit is not None]
            try:
                request = self._core.add(
                    tokens, _params(one.output), priority=one.priority, arrival=self._began + due,
                    deadline=min(patience, default=None), metadata=one.metadata,
                )  # fmt: skip
            except (InvalidRequest, QueueFull) as error:
                answer = Answer(finish="refused", detail=str(error), ended=now, prompt=len(tokens))
                self._end(one, answer, due)
                continue
            self._open[request.id] = _Open(one, due, request, Answer())
            self._most = max(self._most, len(self._open))

    def _plan(self, one: Arrival, due: float) -> None:
        heappush(self._due, (due, next(self._numbers), one))

    def _step(self) -> None:
        core, began = self._core, time.perf_counter()
        before = core.last_plan
        deltas = core.step()
        for request_id, refusal in core.take_refused():
            self._over(self._open.pop(request_id), "refused", str(refusal), self._now())
        plan = core.last_plan
        if plan is not before and plan:
            self._busy += time.perf_counter() - began
            self._steps += 1
            self._rows += len(plan.requests)
        elif not deltas:
            self._rest()
        self._tell(deltas, self._now())

    def _rest(self) -> None:
        """A step that brought nothing is followed by a rest, unless something is due before its end."""
        due = self._due[0][0] - self._now() if self._due else self._core.rest
        time.sleep(max(0.0, min(self._core.rest, due)))

    def _tell(self, deltas: Sequence[Delta], now: float) -> None:
        for delta in deltas:
            opened = self._open.get(delta.request_id)
            if opened is None:
                continue
            if delta.tokens:
                opened.answer.times.append(now)
                opened.answer.tokens += len(delta.tokens)
            if delta.finish is not None:
                del self._open[delta.request_id]
                self._over(opened, delta.finish.value, delta.detail, now)
        if self._progress is not None and deltas:
            self._progress(len(self._books.requests), len(self._workload), now)

    def _over(self, opened: _Open, finish: str, detail: str | None, now: float) -> None:
        """The engine has ended it."""
        answer, request, due = opened.answer, opened.request, opened.due
        answer.finish, answer.detail, answer.ended = finish, detail, now
        answer.prompt, answer.cached, answer.preemptions = (
            request.num_prompt,
            request.cached_tokens,
            request.preemptions,
        )
        answer.waited = None if request.started is None else request.started - self._began - due
        answer.said = request.tokens
        self._end(opened.arrival, answer, due)

    def _end(self, arrival: Arrival, answer: Answer, due: float) -> None:
        self._books.enter(arrival, answer, due)
        now = answer.ended
        self._following.ended(
            arrival, answer.said if answer.finish in GOOD else None,
            come=lambda one: self._plan(one, now + one.at),
            skip=lambda one: self._end(one, Answer(finish="skipped", detail=SKIPPED, ended=now), now),
        )  # fmt: skip
