"""The engine core: requests in, ``plan → execute → commit`` for ever, tokens out. Single-threaded and deterministic."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.core import answers, audit, recovery, weights
from engine.core.arbiter import Arbiter
from engine.core.cache_desk import CacheDesk
from engine.core.cache_events import CacheLog
from engine.core.capabilities import label
from engine.core.clock import Clock
from engine.core.composing import composed
from engine.core.containment import ASK_SECONDS, Naming, started
from engine.core.errors import EngineDead, ExecutionError, InvalidRequest, InvariantViolation, QueueFull
from engine.core.exchange import KV, LONG_REST, REST, Exchange
from engine.core.explain import explain
from engine.core.flight import Flight
from engine.core.grammar import Vocabulary
from engine.core.grammar_desk import GRAMMAR, GrammarDesk
from engine.core.hooks import HookBus
from engine.core.lens.desk import Lens
from engine.core.pages import PagePool
from engine.core.pipeline import Pipeline
from engine.core.plan import Delta, Outcome, Plan, Transfer, Why
from engine.core.pooling import Pooling
from engine.core.progress import Progress
from engine.core.protocols import (
    Connector,
    Context,
    Executor,
    GrammarCompiler,
    KVCache,
    Limits,
    ModelInfo,
    Policy,
    Scheduler,
)
from engine.core.queue import WaitingQueue
from engine.core.record.desk import RecordDesk, RecordOptions
from engine.core.request import Finish, Request, SamplingParams, State
from engine.core.results import ResultApplier, delta
from engine.core.results import finish as end_request
from engine.core.roster import Roster
from engine.core.stats import Counters, StepStats, step_stats
from engine.core.step import Step
from engine.core.timeouts import Timeouts
from engine.core.validate import can_read_cache
from engine.core.watch import RequestWatch
from engine.core.weights import WhileRunning

if TYPE_CHECKING:
    from engine.core.cache_feed import CacheFeed

log = logging.getLogger(__name__)

SHORT_REST = 0.001  # seconds
GRAMMAR_SECONDS = 5.0
STARTS = 64


class EngineCore:
    """Owns every request and drives the plugins. Use ``assemble`` to build one from a configuration.

    In ``overlap`` mode each step is planned before the outcome of the one before is known, while it is being computed.

    Args:
        clock: seconds, for all that depends on time: deadlines, policies, how long loads take.
        sleep: waits for so many of them.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        model: ModelInfo,
        scheduler: Scheduler,
        kv: KVCache,
        executor: Executor,
        policies: Sequence[Policy] = (),
        connectors: Sequence[Connector] = (),
        overlap: bool = False,
        audit_every_step: bool = False,
        ask_seconds: float | Mapping[str, float] = ASK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        cache_log: CacheLog | None = None,
        cache_feed: CacheFeed | None = None,
        description: Mapping[str, Any] | None = None,
        grammar: GrammarCompiler | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
        grammar_seconds: float = GRAMMAR_SECONDS,
        grammar_threads: int = 1,
        record: RecordOptions | None = None,
    ) -> None:
        self.limits = limits
        self.model = model
        self.scheduler = scheduler
        self.kv = kv
        self.executor = executor
        self.counters = Counters()
        self.clock = Clock(clock)
        self.roster = Roster(limits, model, self.clock)
        self.pool = PagePool(limits.num_pages, limits.page_size)
        connectors = composed(connectors)
        watch = RequestWatch(lambda: self.requests) if audit_every_step else None
        members = [scheduler, kv, *connectors, *policies]
        self.hooks = HookBus(members, pool=self.pool, watch=watch, ask_seconds=ask_seconds)
        self.policies, self.connectors = tuple(policies), tuple(connectors)
        self._plugins = [executor, kv, scheduler, *connectors, *policies, *([grammar] if grammar is not None else [])]
        self._naming = Naming(self._plugins)
        self._audit = audit_every_step
        self._description = dict(description or {})
        self.flight = Flight(overlap=overlap)
        self._pipeline = Pipeline(executor, background=overlap and executor.overlaps and executor.threaded)
        self._sleep = sleep
        self._last: Plan | None = None
        self._progress = Progress()
        self.broken: str | None = None
        self._who = f"{label(executor)} of {executor.origin}"
        self._closed = False
        self.weights_epoch = 0
        self.starts: deque[float] = deque(maxlen=STARTS)  # when the last requests started, for estimates
        self._outbox: list[Delta] = []
        self.timeouts = Timeouts(limits.queue_timeout)
        self._timed = False  # whether any request had a ``cache_ttl``
        self.arbiter = Arbiter(self.roster, kv, self.pool, self.hooks)
        self.exchange = Exchange(self, connectors)
        self.cache = CacheDesk(self, cache_log, cache_feed)
        self.grammars = GrammarDesk(self, grammar, vocabulary, seconds=grammar_seconds, threads=grammar_threads)
        self._refused: list[tuple[str, InvalidRequest]] = []
        self._results = ResultApplier(limits, kv, self.counters, overlap=overlap)
        context = Context(limits=limits, pool=self.pool, model=model, clock=self.clock)
        for plugin in self._plugins:
            started(plugin, context)
        self.cache.open()
        self.exchange.register(executor)
        self.waiting.keep_sorted_by(scheduler.queue_key())
        self.record = RecordDesk(self, record)
        self.record.open()
        self.lens = Lens(self)

    # ---- requests

    @property
    def running(self) -> list[Request]:
        """Requests that hold pages, in order of admission."""
        return self.roster.running

    @property
    def waiting(self) -> WaitingQueue:
        """The queue."""
        return self.roster.waiting

    @property
    def parked(self) -> dict[str, Request]:
        """Requests that are not ready, by id."""
        return self.roster.parked

    @property
    def requests(self) -> dict[str, Request]:
        """All live requests by id."""
        return self.roster.live

    def add(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        adapter: str = "",
        arrival: float | None = None,
        read_cache: bool = True,
        write_cache: bool = True,
        cache_ttl: float | None = None,
        deadline: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        parked_on: Iterable[str] = (),
        pooling: Pooling | None = None,
    ) -> Request:
        """Queue a request (parked, if it waits for something named in ``parked_on``).

        Args:
            read_cache: its prefix may come from the prefix cache or a connector.
            write_cache: what it computes may be found by others, here or through a connector.
            cache_ttl: for so many seconds. Connectors that keep content for whoever comes are not given it then.
            deadline: seconds from its arrival; what has not ended then ends with ``timeout``.
            pooling: it ends with a vector (``Delta.vector``) and yields no token; ``params`` is left out then.

        Raises:
            InvalidRequest: names the field and the limit; nothing is queued.
            QueueFull: the bounded queue has no room, and the scheduler would not give up anybody in it.
            EngineDead: the engine was closed.
        """
        self._check_open()
        if cache_ttl is not None and not self.kv.keeps_time:
            raise InvalidRequest("cache_ttl", "is not supported by the KV cache that serves here", code="unsupported")
        params = params or SamplingParams()
        reads = read_cache and can_read_cache(params, pooling)
        has_grammar = getattr(params, "grammar", None) is not None
        looks_up = self.exchange.wants(len(tokens), read_cache=reads)
        parked = [*parked_on, *([KV] if looks_up else []), *([GRAMMAR] if has_grammar else [])]
        create = partial(
            self.roster.create,
            tokens,
            params,
            request_id=request_id,
            priority=priority,
            salt=salt,
            adapter=adapter,
            arrival=arrival,
            read_cache=read_cache,
            write_cache=write_cache,
            cache_ttl=cache_ttl,
            deadline=deadline,
            metadata=metadata,
            parked_on=parked,
            pooling=pooling,
        )
        try:
            request = create()
        except QueueFull:
            if not self.roster.full:
                raise
            with self._naming:
                displaced = self.scheduler.displace(self.waiting, priority)
            if displaced is None or displaced.state is not State.WAITING:
                raise
            self._end_now(displaced, Finish.ABORT, "the queue is full and a more urgent request came")
            try:
                request = create()
            except QueueFull:
                self.record.tell.displaced(displaced)
                raise
        self._timed = self._timed or cache_ttl is not None
        self.record.tell.added(request, deadline, parked)
        self.timeouts.watch(request, len(self.requests))
        if looks_up:
            self.exchange.look_up(request)
        if has_grammar:
            self.grammars.ask(request)
        self.counters.accepted += 1
        self.counters.prompt_tokens += request.num_prompt
        return request

    def ready(self, request_id: str, what: str) -> None:
        """``what`` a parked request waited for is there; when nothing is missing it joins the queue. Idempotent."""
        self.record.tell.readied(request_id, what)
        self.roster.ready(request_id, what)

    def abort(self, request_id: str, finish: Finish = Finish.ABORT, detail: str | None = None) -> bool:
        """End a request now, whatever its state; its pages return at once. Idempotent: False if it had ended."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self.record.tell.aborted(request, finish, detail)
        self._end_now(request, finish, detail)
        return True

    def fail(self, request: Request, detail: str) -> None:
        """End a request with an error and a diagnosis."""
        self._end_now(request, Finish.ERROR, detail)

    def refuse(self, request: Request, error: InvalidRequest) -> None:
        """End a request of which it turned out late that it is invalid; see ``take_refused``."""
        self._refused.append((request.id, error))
        self.abort(request.id, Finish.ERROR, str(error))

    def take_refused(self) -> list[tuple[str, InvalidRequest]]:
        """Requests that were refused after they had been queued since the last call, and why."""
        refused, self._refused = self._refused, []
        return refused

    def _end_now(self, request: Request, finish: Finish, detail: str | None) -> None:
        with self._naming:
            self.roster.withdraw(request)
            end_request(request, finish, detail, self.counters)
            self.scheduler.on_end(request)
            self._let_go(request)
            self._outbox.append(delta(request, ()))

    def _let_go(self, request: Request) -> None:
        """Return all that a finished request holds. Content that was computed may stay cached."""
        self.exchange.forget(request)
        self.grammars.forget(request)
        self.kv.release(request, keep=min(request.computed, request.num_tokens) if request.write_cache else 0)
        request.pages = []
        request.planned = request.computed
        request.pending = request.quiet = 0
        request.epoch += 1
        self.record.tell.ended(request)
        self.roster.forget(request)
        self.executor.forget(request)

    # ---- the step

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do. Parked requests alone are no work; deltas that nobody took are.

        So whoever plans and commits by hand calls ``take_deltas`` after each commit: ``step`` does it by itself.
        """
        waited_for = self.exchange or len(self.grammars)
        return bool(self.running or len(self.waiting) or self._outbox or waited_for or len(self.flight))

    @property
    def settled(self) -> bool:
        """Whether nothing is left of any request that was ready, but KV that goes out (``step`` looks after it)."""
        rest = self.running or len(self.waiting) or self._outbox or len(self.flight)
        return not (rest or self.exchange.incoming or len(self.grammars))

    @property
    def rest(self) -> float:
        """Seconds for which ``step`` need not be called after one that brought nothing, unless something new comes."""
        return LONG_REST if self.exchange and self.settled and not self.parked else SHORT_REST

    def step(self) -> list[Delta]:
        """Plan, execute, commit; returns what is new for each request. A failing executor fails its plan's requests.

        In overlap mode what is committed is the plan of the step before.

        Raises:
            InvariantViolation: a role plugin broke a rule; the engine must not go on.
            ExecutionError: after a failed step (whose requests were told) the executor said that it is broken.
            EngineDead: the engine was closed.
        """
        self._check_open()
        if self.broken is not None:
            raise ExecutionError(f"the executor cannot go on: {self.broken}")
        try:
            with self._naming:
                return self._step()
        except Exception:
            raise
        except BaseException:  # Ctrl-C in a notebook: the engine is to be used again
            self._pipeline.abandon()
            self.record.tell.interrupted()
            self.broken = recovery.interrupted(self)
            raise

    def _step(self) -> list[Delta]:
        for request, words in self.timeouts.due(self.roster.now()):
            self.abort(request.id, Finish.TIMEOUT, words)
        self.keep_time()
        self.exchange.move()
        if len(self.grammars):
            self.grammars.collect()
        before = self.flight.oldest
        plan = self.plan()
        if plan:
            self._pipeline.launch(plan)
        elif before is None and (self.exchange or len(self.grammars)):
            self._sleep(REST)  # there is nothing to do but to wait for a connector, or for a grammar
        if before is not None:
            self._complete(before)
        if self.flight.oldest is plan and not (plan and self.flight.overlap):
            self._complete(plan)
        if not (self.running or len(self.waiting) or len(self.flight)):
            self.idle()
        return self.take_deltas()

    def expire(self, now: float) -> None:
        """What was written with a ``cache_ttl`` that is over is not found from now on. See ``keep_time``."""
        self.record.tell.expired()
        self.kv.expire(now)

    def keep_time(self) -> None:
        """``expire``, now, if any request ever had a ``cache_ttl``. ``step`` does it first."""
        if self._timed:
            self.expire(self.roster.now())

    def idle(self) -> None:
        """Nothing is left to plan: tell the scheduler. ``step`` does; so does whoever plans and commits by hand."""
        self.record.tell.idled()
        self.scheduler.on_idle()

    def _complete(self, plan: Plan) -> None:
        """Wait for a plan's outcome and commit it, or tell its requests that it failed."""
        try:
            outcome = Outcome(plan, ())
            if plan:
                outcome = answers.outcome(self._pipeline.collect(), plan, self._who, self.model.hidden_size)
        except Exception as error:
            log.exception("%s: step %d failed", self._who, plan.index)
            self._pipeline.abandon()
            self.fail_step(plan, f"{type(error).__name__}: {error}")
            self.broken = self.executor.broken()
        else:
            self.commit(outcome)

    def drain(self) -> list[Delta]:
        """Complete the steps in flight and plan no other (overlap mode; else there is none). Returns what is new."""
        self.land()
        return self.take_deltas()

    def land(self) -> None:
        """Complete the steps in flight. Mutates."""
        while (plan := self.flight.oldest) is not None:
            self._complete(plan)

    def take_deltas(self) -> list[Delta]:
        """What is new since the last call."""
        deltas, self._outbox = self._outbox, []
        return deltas

    def plan(self) -> Plan:
        """Ask for the next plan. It must be committed or failed before the next one (overlap: the one after it)."""
        self.flight.check_room()
        self.arbiter.forget_step()
        self.counters.steps += 1
        tell = self.record.tell
        tell.deciding = True
        step = Step(self, self.counters.steps, override=self._progress.override)
        began = self.clock.hold()
        try:
            plan = self.hooks.ask_plan(step)
        finally:
            self.clock.release()
        if plan is not step.plan:
            raise InvariantViolation("the plan is not the one that step.seal() gave")
        self.flight.depart(plan, step)
        self._last = plan
        self.counters.preemptions += len(plan.preempted)
        self.counters.evicted_pages += plan.evicted_pages
        if plan.total_tokens > self.limits.max_batch_tokens:
            raise InvariantViolation(
                f"a plan of {plan.total_tokens} tokens; {self.limits.max_batch_tokens} is the limit"
            )
        tell.planned(plan, began)
        return plan

    def commit(self, outcome: Outcome) -> None:
        """Apply a plan's outcome: tokens, ends, publication, books. Rows whose request is gone are dropped.

        Raises:
            InvariantViolation: the outcome is not that of the plan in flight.
        """
        plan = outcome.plan
        if len(outcome.tokens) != len(plan.requests):
            raise InvariantViolation("a plan commits only with its own outcome, row by row")
        began = self.clock.hold()
        try:
            self._commit(outcome, began)
        finally:
            self.clock.release()
        if self._audit:
            self.check()

    def _commit(self, outcome: Outcome, began: float) -> None:
        plan, tell = outcome.plan, self.record.tell
        tell.deciding = True
        step, alone = self.flight.land(plan)
        if outcome.errors:
            recovery.isolate(self, outcome, step)
        self._results.apply(outcome, self._outbox)
        if alone or plan:
            self._progress.committed(self, outcome)
        if outcome.finished:
            self.roster.sweep(outcome.finished)
        finished = outcome.finished  # whoever is told may change what it is shown
        self.hooks.tell_commit(outcome)
        self.exchange.committed(plan, finished)
        for request in finished:
            self._let_go(request)
        if self.cache.watch is not None:
            self.cache.settle()
        tell.committed(outcome, began)

    def fail_step(self, plan: Plan, why: str) -> None:
        """The oldest plan in flight was not computed, and none after it will be.

        Un-publishes what they published, ends the failed plan's requests with an error; requests that only a later plan
        computes start again.
        """
        self.record.tell.failing(plan)
        recovery.fail_step(self, plan, why)
        self.cache.settle()
        if self._audit:
            self.check()

    # ---- asked by Step

    def enter(self, request: Request, hit: int) -> None:
        """The request starts: it holds pages and ``hit`` tokens of it need no computing."""
        self.roster.start(request)
        request.computed = request.planned = hit
        request.prefill_target = request.num_tokens
        if request.started is None:
            request.started = now = self.roster.now()
            self.starts.append(now)
            request.cached_tokens = hit
        self.counters.cached_tokens += hit
        self.counters.looked_up_tokens += request.num_tokens

    def give_up(self, request: Request, *, front: bool) -> None:
        """The request is preempted: it lets go of its pages, keeps its output, and waits again."""
        self.counters.recomputed_tokens += request.computed
        self.kv.release(request, keep=0)
        self.roster.requeue(request, front=front)
        request.pages = []
        request.computed = request.planned = 0
        request.pending = request.quiet = 0
        request.drafts = ()
        request.pooled = None
        request.lagging = False
        request.epoch += 1
        request.preemptions += 1
        self.scheduler.on_preempt(request)

    # ---- other weights

    def update_weights(self, new: Any, *, running: WhileRunning = "refuse", version: str | None = None) -> ModelInfo:
        """Replace the model's weights between two steps. What the old ones computed is never matched again.

        Steps in flight are completed first. Requests that have not begun are computed by the new weights.

        Args:
            new: what the executor takes: weights by name, or where to read them; or a function that is given the
                weights in force and returns those to replace.
            running: what becomes of requests that have begun. ``refuse``: an error, and nothing is changed;
                ``recompute``: they go on after the output they have, all of it computed anew by the new weights;
                ``abort``: they end.
            version: names the weights; equal names must mean equal weights. Default: a digest of their content.

        Raises:
            EngineError: requests have begun and ``running`` is ``refuse``; or KV is being transferred.
            ConfigError, ModelError: as the executor says; nothing was changed.
        """
        self._check_open()
        if not self.flight.overlap:
            self.flight.check_room()
        while (plan := self.flight.oldest) is not None:
            self._complete(plan)
        weights.check_running(self, running)
        fingerprint = weights.replace_all(self, new, running, version)
        self.rename_model(fingerprint)
        return self.model

    def rename_model(self, fingerprint: str) -> None:
        """The model computes other KV from now on: forget all there is. Those that run start again, output kept."""
        self.record.tell.renamed(fingerprint)
        self.model = weights.renamed(self, fingerprint)
        self.weights_epoch += 1
        self.exchange.reset()
        if "model" in self._description:
            self._description["model"] = {**self._description["model"], "fingerprint": fingerprint}
        for plugin in self._plugins:
            plugin.weights_changed(self.model)
        if self._audit:
            self.check()

    # ---- transfers

    def transfer(self, wish: Transfer) -> None:
        """Ask the connectors to move KV; the pages stay fenced until an event ends the transfer."""
        self.exchange.ask(wish)

    # ---- to look at

    def why(self, request_id: str) -> tuple[Why, str] | None:
        """Why a live request got nothing in the last step, or less than it owed; ``None`` where it got all of it."""
        request = self.requests.get(request_id)
        return None if request is None else explain(request, self._last, self.limits.max_batch_tokens)

    @property
    def last_plan(self) -> Plan | None:
        """The plan made last; ``None`` before the first."""
        return self._last

    def now(self) -> float:
        """Seconds on the engine's clock, on which requests arrive and start."""
        return self.roster.now()

    def step_stats(self) -> StepStats | None:
        """What the last plan holds, in numbers; ``None`` before the first."""
        return None if self._last is None else step_stats(self._last)

    def stats(self) -> dict[str, int | float]:
        """Gauges of this moment and counters since the start."""
        numbers = self.kv.numbers()
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "parked": len(self.parked),
            "waiting_tokens": self.roster.waiting_tokens,
            "pages_total": numbers.total,
            "pages_free": numbers.free,
            "pages_evictable": numbers.evictable,
            "pages_pinned": numbers.pinned,
            **self.counters.flat(),
            **{f"scheduler_{name}": value for name, value in self.scheduler.stats().items()},
            **self.exchange.stats(),
            **self.hooks.stats(),
        }

    def describe(self) -> dict[str, Any]:
        """What was chosen and how large it is; who is asked what, in which order; who was at fault so far."""
        faults = [fault._asdict() for fault in self.hooks.faults()]
        return {**self._description, "hooks": self.hooks.asked(), "faults": faults}

    def describe_also(self, **more: Any) -> None:
        """Add to the description. Mutates."""
        self._description.update(more)

    def check(self) -> None:
        """Audit every invariant of requests, plans and pages. Raises ``InvariantViolation``."""
        audit.check(self)

    def close(self) -> None:
        """End what is left, then close every plugin. Idempotent. ``take_deltas`` still tells how requests ended."""
        self._closed = True
        self._pipeline.close()
        for request_id in list(self.requests):
            self.abort(request_id, detail="the engine was closed")
        self.grammars.close()
        self.record.close()
        plugins, self._plugins = self._plugins, []
        for plugin in reversed(plugins):
            plugin.close()
        self.cache.close()

    # ---- inside

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("the engine was closed")
