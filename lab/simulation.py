"""Simulation: real schedulers, caches and cores, on time that is computed. Events, not seconds, are what passes.

    arrival ──▶ router ──▶ engine (prefill) ──▶ router ──▶ KV moves ──▶ engine (decode) ──▶ tokens, end ──▶ followers
                   └─────────────────── engine (both) ─────────────────────────────────────────┘

An engine's turn is one real ``EngineCore.step``, which sets the engine's own clock to the end of the step; what came of
it is told then. Requests that come meanwhile are in the queue when the next turn begins, as in a server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.config import EngineConfig
from engine.core.errors import InvalidRequest, QueueFull
from engine.core.plan import Delta
from engine.core.registry import Registry
from engine.core.request import Finish, Request, SamplingParams
from engine.lab.arrivals import Arrival, Workload, tokens_of
from engine.lab.cost import CostModel
from engine.lab.following import SKIPPED, Following
from engine.lab.handoff import SOURCE, Links
from engine.lab.measured import GOOD, Timed, timed_gaps
from engine.lab.replica import Fleet, Replica, replica
from engine.lab.results import Results
from engine.lab.routers import Router, router

ARRIVAL, TURN = 0, 1  # of events at one time, arrivals come first
TELL_EVERY = 512  # events

Progress = Callable[[int, int, float], None]
"""Told now and then: requests that have ended, all requests, simulated seconds."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request under way."""

    arrival: Arrival
    came: float
    tokens: list[int]
    at: Replica | None = None
    side: Router | None = None
    owed: int = 0  # tokens that the router counts for it
    request: Request | None = None
    times: list[float] = field(default_factory=list)
    prefill: Request | None = None  # its prompt's, computed elsewhere
    prefilled: float = 0.0
    prefill_engine: str = ""


class Simulation:
    """A workload on a fleet. Make it, ``run`` it, once.

    Args:
        config: of every engine, as for ``engine serve``; ``executor`` may bring options of ``ModelledExecutor``.
        cost: how long steps take, instead of what the executor's options say.
        progress: told how far it is.

    Raises:
        ConfigError, ModelError, PluginError: as ``assemble``; an engine cannot be simulated.
    """

    def __init__(
        self,
        config: EngineConfig,
        workload: Workload,
        fleet: Fleet | None = None,
        *,
        cost: CostModel | None = None,
        progress: Progress | None = None,
        registry: Registry | None = None,
    ) -> None:
        self.workload, self.fleet = workload, fleet or Fleet()
        self._progress = progress
        self._router = router(self.fleet.router, self.fleet.replicas)
        self._prefill_router = router(self.fleet.router, self.fleet.prefill) if self.fleet.prefill else None
        self.replicas: list[Replica] = []
        self.prefills: list[Replica] = []
        try:
            self._build(config, cost, registry or Registry())
        except BaseException:
            self._close()
            raise
        self._vocab = self.replicas[0].core.limits.vocab_size
        self._events: list[tuple[float, int, int, Any]] = []
        self._numbers = 0
        self._open: dict[str, _Open] = {}
        self._done: list[Timed] = []
        self._gaps: list[NDArray[np.float32]] = []
        self._following = Following(workload)
        self._last = 0.0

    def _build(self, config: EngineConfig, cost: CostModel | None, registry: Registry) -> None:
        links, fleet = None, self.fleet
        for number in range(fleet.prefill):
            one = replica(config, f"prefill-{number}", number, cost=cost, links=None, registry=registry)
            self.prefills.append(one)
        if self.prefills:
            core = self.prefills[0].core
            page_bytes = core.model.kv_bytes_per_token * core.limits.page_size
            links = Links(fleet.link_gbps * 1e9 / 8, fleet.link_ms / 1e3, page_bytes)
        kind = "decode" if self.prefills else "engine"
        for number in range(fleet.replicas):
            one = replica(config, f"{kind}-{number}", number, cost=cost, links=links, registry=registry)
            self.replicas.append(one)

    def _close(self) -> None:
        for one in (*self.prefills, *self.replicas):
            one.core.close()

    def run(self) -> Results:
        """Until every request has ended. Mutates.

        Raises:
            InvariantViolation: a role plugin broke a rule.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            self._begin()
            first = self._events[0][0] if self._events else 0.0
            self._loop()
            used = [one.used() for one in (*self.prefills, *self.replicas)]
        finally:
            self._close()
        return Results(
            workload=self.workload.name, requests=tuple(self._done),
            gaps=np.concatenate(self._gaps) if self._gaps else np.empty(0, np.float32), seconds=self._last - first,
            engines=tuple(used), wall=time.perf_counter() - wall, cpu=time.process_time() - cpu, about=self._about(),
        )  # fmt: skip

    def _about(self) -> dict[str, Any]:
        one = self.replicas[0]
        told = one.core.describe()
        model = {**told["model"], "cost": one.executor.cost.describe()}
        return {"fleet": asdict(self.fleet), "model": model, **{n: told[n] for n in ("plugins", "limits", "loop")}}

    # ---- events

    def _begin(self) -> None:
        for one in self._following.roots:
            self._numbers += 1
            self._events.append((one.at, ARRIVAL, self._numbers, one))
        heapify(self._events)

    def _push(self, when: float, kind: int, what: Any) -> None:
        self._numbers += 1
        heappush(self._events, (when, kind, self._numbers, what))

    def _loop(self) -> None:
        events, total, tell = self._events, len(self.workload), self._progress
        count = 0
        while events:
            when, kind, _, what = heappop(events)
            if kind == ARRIVAL:
                self._arrive(what, when)
            else:
                self._turn(what, when)
            count += 1
            if tell is not None and not count % TELL_EVERY:
                tell(len(self._done), total, when)
        if tell is not None:
            tell(len(self._done), total, self._last)

    def _turn(self, one: Replica, now: float) -> None:
        """A step of an engine has ended: tell what came of it, and begin the next."""
        if one.news:
            news, one.news = one.news, ()
            self._tell(one, news, now)
            if self._events and self._events[0][0] <= now and self._events[0][1] == ARRIVAL:
                self._push(now, TURN, one)  # who follows at once is in the queue before the next step
                return
        if not one.core.has_work:
            one.due = False
            return
        self._push(one.step(now), TURN, one)

    # ---- requests

    def _arrive(self, arrival: Arrival, now: float) -> None:
        before = self._following.begin(arrival) or []
        opened = _Open(arrival, now, before + tokens_of(arrival.prompt, self._vocab))
        if self._prefill_router is None:
            self._submit(opened, self._router, self.replicas, now)
        else:
            self._submit(opened, self._prefill_router, self.prefills, now)

    def _submit(self, opened: _Open, side: Router, among: Sequence[Replica], now: float) -> None:
        """Give a request, or its prompt alone, to an engine of a side."""
        arrival, prompt = opened.arrival, opened.tokens
        computes = side is self._prefill_router
        metadata = arrival.metadata
        if opened.prefill is not None:
            metadata[SOURCE] = opened.prefill_engine
        one = among[side.choose(prompt)]
        output = 1 if computes else max(arrival.output, arrival.max_tokens)
        ends = output > arrival.output
        params = _params(output, one.executor.end_token if ends else None)
        try:
            request = one.add(
                arrival.id, prompt, params, now, priority=arrival.priority, arrival=opened.came,
                deadline=arrival.deadline, metadata=metadata,
            )  # fmt: skip
        except (InvalidRequest, QueueFull) as error:
            self._end(opened, now, "refused", str(error))
            return
        if ends:
            one.executor.ends[arrival.id] = arrival.output
        opened.at, opened.side, opened.owed = one, side, len(prompt) + output
        side.sent(one.number, opened.owed)
        if computes:
            opened.prefill, opened.prefill_engine = request, one.name
        else:
            opened.request = request
        self._open[arrival.id] = opened
        if not one.due:
            one.due = True
            self._push(max(now, one.clock.now), TURN, one)

    def _tell(self, one: Replica, news: Sequence[Delta], now: float) -> None:
        """Tokens and ends of a step that is over."""
        opens = self._open
        for delta in news:  # a row each: no name is given to what is looked at once
            opened = opens[delta[0]]
            tokens = delta[1]
            if tokens:
                times = opened.times
                if not times:
                    self._answered(opened, one)
                times.append(now)
                if len(tokens) > 1:
                    times.extend([now] * (len(tokens) - 1))
            if delta[2] is not None:
                self._ended(opened, one, delta[2], delta[3], now)

    @staticmethod
    def _answered(opened: _Open, one: Replica) -> None:
        """The first token came: the router counts the prompt no more."""
        assert opened.side is not None
        prompt = len(opened.tokens)
        opened.side.answered(one.number, prompt)
        opened.owed -= prompt

    def _ended(self, opened: _Open, one: Replica, finish: Finish, detail: str | None, now: float) -> None:
        """An engine has ended it. Where that was its prompt alone, it goes on elsewhere."""
        assert opened.side is not None
        opened.side.ended(one.number, opened.owed)
        del self._open[opened.arrival.id]
        if opened.request is None and finish is Finish.LENGTH and detail is None:
            opened.prefilled, opened.times = now, []
            self._submit(opened, self._router, self.replicas, now)
        else:
            self._end(opened, now, finish.value, detail)

    def _end(self, opened: _Open, now: float, finish: str, detail: str | None) -> None:
        gaps, own = timed_gaps(opened.times)
        arrival, times, came = opened.arrival, opened.times, opened.came
        first, request = opened.prefill or opened.request, opened.request
        started = None if first is None else first.started
        second = None if request is None or opened.prefill is None else request.started
        self._gaps.append(gaps)
        self._done.append(
            Timed(
                id=arrival.id,
                tenant=arrival.tenant,
                arrival=came,
                prompt=len(opened.tokens),
                output=len(times),
                finish=finish,
                detail=detail,
                queue=None if started is None else started - came,
                ttft=times[0] - came if times else None,
                e2e=now - came,
                handoff=None if second is None else second - opened.prefilled,
                cached=0 if first is None else first.cached_tokens,
                preemptions=sum(one.preemptions for one in (opened.prefill, request) if one is not None),
                engine=opened.at.name if opened.at is not None else "",
                prefill_engine=opened.prefill_engine,
                **own,
            )
        )
        self._last = max(self._last, now)
        said = request.tokens if request is not None and finish in GOOD else None
        self._following.ended(
            arrival, said, come=lambda one: self._push(now + one.at, ARRIVAL, one),
            skip=lambda one: self._end(_Open(one, now, []), now, "skipped", SKIPPED),
        )  # fmt: skip


@lru_cache(maxsize=4096)
def _params(output: int, end: int | None) -> SamplingParams:
    stops = () if end is None else (end,)
    return SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=not stops, stop_token_ids=stops)


def simulate(
    config: EngineConfig,
    workload: Workload,
    fleet: Fleet | None = None,
    *,
    cost: CostModel | None = None,
    progress: Progress | None = None,
) -> Results:
    """Run a workload on simulated engines. The same arguments give the same results, but for ``wall`` and ``cpu``.

    Arguments and errors as for ``Simulation``.
    """
    return Simulation(config, workload, fleet, cost=cost, progress=progress).run()
