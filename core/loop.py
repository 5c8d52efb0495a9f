"""The engine core: requests in, ``plan → execute → commit`` for ever, tokens out. Single-threaded and deterministic."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engine.core import audit
from engine.core.errors import EngineError, InvalidRequest, InvariantViolation, QueueFull
from engine.core.hooks import HookBus
from engine.core.identity import namespace_digest
from engine.core.pages import PagePool
from engine.core.plan import Candidate, Delta, EvictionPool, Outcome, Plan, Transfer, TransferEvent, Why
from engine.core.protocols import Connector, Context, Executor, KVCache, Limits, ModelInfo, Policy, Scheduler
from engine.core.queue import WaitingQueue
from engine.core.request import Finish, Request, SamplingParams, State
from engine.core.stats import Counters
from engine.core.step import Step, running_pool
from engine.core.validate import validate

log = logging.getLogger(__name__)

ORDER_WINDOW = 4096
IDLE_PLANS_BEFORE_OVERRIDE = 1
IDLE_PLANS_BEFORE_FAILING = 2


class EngineCore:
    """Owns every request and drives the plugins. Use ``assemble`` to build one from a configuration.

    Attributes:
        running: requests that hold pages, in order of admission.
        waiting: the queue.
        requests: all live requests by id.
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
        audit_every_step: bool = False,
        clock: Callable[[], float] = time.monotonic,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self.limits = limits
        self.model = model
        self.scheduler = scheduler
        self.kv = kv
        self.executor = executor
        self.counters = Counters()
        self.running: list[Request] = []
        self.waiting = WaitingQueue()
        self.parked: dict[str, Request] = {}
        self.requests: dict[str, Request] = {}
        self.pool = PagePool(limits.num_pages, limits.page_size)
        self.hooks = HookBus([scheduler, kv, *connectors, *policies])
        self._plugins = [executor, kv, scheduler, *connectors, *policies]
        self._audit = audit_every_step
        self._clock = clock
        self._description = dict(description or {})
        self._in_flight: tuple[Plan, Step] | None = None
        self._last: Plan | None = None
        self._memo: dict[str, int] = {}
        self._idle_plans = 0
        self._arrivals = 0
        self._outbox: list[Delta] = []
        self._wishes: list[Transfer] = []
        self._transfers: dict[str, Transfer] = {}
        context = Context(limits=limits, pool=self.pool, model=model)
        for plugin in self._plugins:
            plugin.start(context)

    # ---- requests

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
        metadata: Mapping[str, Any] | None = None,
        parked_on: Iterable[str] = (),
    ) -> Request:
        """Queue a request (parked, if it waits for something named in ``parked_on``).

        Raises:
            InvalidRequest: names the field and the limit; nothing is queued.
            QueueFull: the bounded queue has no room.
        """
        params = params or SamplingParams()
        max_total = validate(tokens, params, self.limits)
        if request_id is not None and request_id in self.requests:
            raise InvalidRequest("request_id", f"{request_id!r} is in use by a live request")
        if len(self.waiting) + len(self.parked) >= self.limits.max_waiting:
            raise QueueFull(f"{self.limits.max_waiting} requests are waiting, the most that may")
        self._arrivals += 1
        request = Request(
            id=request_id if request_id is not None else f"r{self._arrivals}",
            tokens=list(tokens),
            num_prompt=len(tokens),
            params=params,
            max_total=max_total,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.model.eos_ids),
            namespace=namespace_digest(self.model.fingerprint, adapter, salt),
            priority=priority,
            arrival=self._clock() if arrival is None else arrival,
            arrival_index=self._arrivals,
            metadata=dict(metadata or {}),
            parked_on=set(parked_on),
        )
        self.requests[request.id] = request
        self.counters.accepted += 1
        self.counters.prompt_tokens += request.num_prompt
        if request.parked_on:
            request.state = State.PARKED
            self.parked[request.id] = request
        else:
            self.waiting.push(request)
        return request

    def ready(self, request_id: str, what: str) -> None:
        """``what`` a parked request waited for is there; when nothing is missing it joins the queue. Idempotent."""
        request = self.parked.get(request_id)
        if request is None:
            return
        request.parked_on.discard(what)
        if not request.parked_on:
            del self.parked[request_id]
            request.state = State.WAITING
            self.waiting.push(request)

    def abort(self, request_id: str, finish: Finish = Finish.ABORT, detail: str | None = None) -> bool:
        """End a request now, whatever its state; its pages return at once. Idempotent: False if it had ended."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._end_now(request, finish, detail)
        return True

    def fail(self, request: Request, detail: str) -> None:
        """End a request with an error and a diagnosis."""
        self._end_now(request, Finish.ERROR, detail)

    def _end_now(self, request: Request, finish: Finish, detail: str | None) -> None:
        if request.state is State.RUNNING:
            self.running.remove(request)
        self.waiting.remove((request,))
        self.parked.pop(request.id, None)
        self._finish(request, finish, detail)
        self.scheduler.on_end(request)
        self._let_go(request)
        self._outbox.append(self._delta(request, ()))

    def _finish(self, request: Request, finish: Finish, detail: str | None) -> None:
        request.state = State.FINISHED
        request.finish = finish
        request.detail = detail
        self.counters.ended(finish)

    def _let_go(self, request: Request) -> None:
        """Return all that a finished request holds. Content that was computed may stay cached."""
        self.kv.release(request, keep=request.computed)
        request.pages = []
        request.in_flight = 0
        request.epoch += 1
        request.table_version += 1
        del self.requests[request.id]
        self.executor.forget(request)

    # ---- the step

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do. Parked requests alone are no work."""
        return bool(self.running or len(self.waiting) or self._outbox or self._transfers or self._wishes)

    def step(self) -> list[Delta]:
        """Plan, execute, commit; returns what is new for each request. A failing executor fails its plan's requests.

        Raises:
            InvariantViolation: a role plugin broke a rule; the engine must not go on.
        """
        self._move()
        plan = self.plan()
        if plan:
            try:
                outcome = self.executor.execute(plan)
            except Exception as error:
                log.exception("step %d failed", plan.index)
                self.fail_step(plan, f"{type(error).__name__}: {error}")
                return self.take_deltas()
        else:
            outcome = Outcome(plan, ())
        self.commit(outcome)
        return self.take_deltas()

    def take_deltas(self) -> list[Delta]:
        """What is new since the last call."""
        deltas, self._outbox = self._outbox, []
        return deltas

    def plan(self) -> Plan:
        """Ask for the next plan. It must be committed or failed before the next one."""
        if self._in_flight is not None:
            raise EngineError("the last plan was neither committed nor failed")
        self._memo.clear()
        self.counters.steps += 1
        step = Step(self, self.counters.steps, override=self._idle_plans > IDLE_PLANS_BEFORE_OVERRIDE)
        plan = self.hooks.ask_plan(step)
        if plan is not step.plan:
            raise InvariantViolation("the plan is not the one that step.seal() gave")
        self._in_flight = (plan, step)
        self._last = plan
        self.counters.preemptions += len(plan.preempted)
        self.counters.evicted_pages += plan.evicted_pages
        if plan or not (self.running or len(self.waiting)):
            self._idle_plans = 0
        else:
            self._idle_plans += 1
            if self._idle_plans > IDLE_PLANS_BEFORE_OVERRIDE + IDLE_PLANS_BEFORE_FAILING:
                self._break_stall()
        return plan

    def commit(self, outcome: Outcome) -> None:
        """Apply a plan's outcome: tokens, ends, publication, books. Rows whose request is gone are dropped.

        Raises:
            InvariantViolation: the outcome is not that of the plan in flight.
        """
        plan = outcome.plan
        if self._in_flight is None or self._in_flight[0] is not plan or len(outcome.tokens) != len(plan.requests):
            raise InvariantViolation("a plan commits only with its own outcome, row by row")
        self._in_flight = None
        finished, dropped = self._apply(outcome)
        outcome.finished = tuple(finished)
        outcome.dropped = tuple(dropped)
        if finished:
            self.running = [request for request in self.running if request.state is State.RUNNING]
        self.hooks.tell_commit(outcome)
        for request in finished:
            self._let_go(request)
        if self._audit:
            self.check()

    def _apply(self, outcome: Outcome) -> tuple[list[Request], list[int]]:
        plan, errors = outcome.plan, outcome.errors
        finished: list[Request] = []
        dropped: list[int] = []
        publish = self.kv.publish_when != "planned"
        computed = output = 0
        outbox, vocab, pool_tokens = self._outbox, self.limits.vocab_size, self.limits.pool_tokens
        rows = zip(plan.requests, plan.epochs, plan.counts, outcome.tokens, strict=True)
        for row, (request, epoch, count, tokens) in enumerate(rows):
            if request.epoch != epoch:
                dropped.append(row)
                continue
            computed += count
            request.in_flight -= count
            request.computed += count
            if publish:
                self._publish(request, count)
            if errors and row in errors:
                self._finish(request, Finish.ERROR, errors[row])
                tokens = ()
            elif not tokens:
                continue
            elif len(tokens) == 1 and 0 <= (token := tokens[0]) < vocab and token not in request.stop_ids:
                # The steady state: one token that can only end the request by its length.
                known = request.tokens
                known.append(token)
                output += 1
                if len(known) >= request.max_total or len(known) > pool_tokens:
                    self._finish_by_length(request)
            else:
                tokens = self._append(request, tokens)
                output += len(tokens)
            if request.finish is not None:
                finished.append(request)
            outbox.append(self._delta(request, tokens))
        self.counters.computed_tokens += computed
        self.counters.output_tokens += output
        self.counters.late_results += len(dropped)
        return finished, dropped

    def _append(self, request: Request, tokens: Sequence[int]) -> Sequence[int]:
        """Append sampled tokens until one ends the request; returns those that count."""
        known, vocab = request.tokens, self.limits.vocab_size
        for number, token in enumerate(tokens, 1):
            if not 0 <= token < vocab:
                self._finish(request, Finish.ERROR, f"the executor sampled token {token} outside the vocabulary")
                tokens = tokens[: number - 1]
                break
            known.append(token)
            if token in request.stop_ids and request.num_output >= request.params.min_tokens:
                self._finish(request, Finish.STOP, str(token))
            elif len(known) >= request.max_total or len(known) > self.limits.pool_tokens:
                self._finish_by_length(request)
            else:
                continue
            tokens = tokens[:number]
            break
        return tokens

    def _finish_by_length(self, request: Request) -> None:
        """The request may not grow: its own limit, or the whole pool does not hold its next token's KV."""
        self._finish(request, Finish.LENGTH, None if request.num_tokens >= request.max_total else "kv_capacity")

    def _publish(self, request: Request, count: int) -> None:
        """Publish committed tokens, where a page was completed (and, for ``prefilled`` caches, by a prefill)."""
        size = self.limits.page_size
        upto = request.computed
        if upto // size == (upto - count) // size:
            return
        if self.kv.publish_when == "prefilled" and upto > request.prefill_target:
            return
        pages = self.kv.publish(request, upto).pages
        if pages is not None:
            request.pages = pages
            request.table_version += 1

    def fail_step(self, plan: Plan, why: str) -> None:
        """The plan in flight was not computed: un-publish what it published, end its requests with an error."""
        if self._in_flight is None or self._in_flight[0] is not plan:
            raise InvariantViolation("only the plan in flight can fail")
        step = self._in_flight[1]
        self._in_flight = None
        self.counters.failed_steps += 1
        for keys in step.journal.values():
            self.kv.unpublish(keys)
        for request, epoch in zip(plan.requests, plan.epochs, strict=True):
            if request.epoch == epoch:
                self.fail(request, f"the step failed: {why}")
        if self._audit:
            self.check()

    # ---- asked by Step

    def order(self, step: Step) -> list[Request]:
        """The queue's window after the ``order`` hook; the queue keeps the order."""
        window = self.waiting.window(ORDER_WINDOW)
        if len(window) < 2 and not window:
            return window
        ordered = self.hooks.ask_order(step, window)
        if ordered is None:
            return window
        self.waiting.reorder(len(window), ordered)
        if len(ordered) < len(window):
            chosen = set(ordered)
            for request in window:
                if request not in chosen:
                    step.note(request, Why.ORDER)
            if step.override and not ordered:
                return window
        return ordered

    def cached(self, request: Request) -> int:
        """Memoised length of the cached prefix."""
        known = self._memo.get(request.id)
        if known is None:
            known = self._memo[request.id] = self.kv.match(request).tokens
        return known

    def enter(self, request: Request, hit: int) -> None:
        """The request starts: it holds pages and ``hit`` tokens of it need no computing."""
        self.waiting.remove((request,))
        request.state = State.RUNNING
        request.computed = hit
        request.prefill_target = request.num_tokens
        request.table_version += 1
        if request.preemptions == 0:
            request.cached_tokens = hit
        self.counters.cached_tokens += hit
        self.running.append(request)

    def give_up(self, request: Request, *, front: bool) -> None:
        """The request is preempted: it lets go of its pages, keeps its output, and waits again."""
        self.counters.recomputed_tokens += request.computed
        self.kv.release(request, keep=0)
        self.running.remove(request)
        request.pages = []
        request.computed = 0
        request.in_flight = 0
        request.epoch += 1
        request.table_version += 1
        request.preemptions += 1
        request.state = State.WAITING
        self.waiting.push(request, front=front)
        self.scheduler.on_preempt(request)

    def choose_victim(self, step: Step, needy: Request | None) -> Request | None:
        """Whom to preempt: the hook's first valid answer, else the latest admitted."""
        pool = running_pool(self, step, needy)
        for key in self.hooks.ask_evict(1, pool):
            if isinstance(key, Request) and step.may_preempt(key):
                return key
        remaining: Sequence[Candidate] = pool.candidates()
        return remaining[0].request if remaining else None

    def free_up(self, count: int, step: Step) -> bool:
        """Make ``count`` pages free, evicting idle content; False, with nothing evicted, where they cannot be had."""
        short = count - self.pool.num_free
        if short <= 0:
            return True
        if short > self.kv.numbers().evictable:
            return False
        pool = EvictionPool("cache", self.kv.candidates)
        step.evicted += self.kv.drop(self.hooks.ask_evict(short, pool), short)
        while (short := count - self.pool.num_free) > 0:
            freed = self.kv.drop(self.kv.victims(short), short)
            step.evicted += freed
            if not freed:
                return False
        return True

    # ---- transfers

    def transfer(self, wish: Transfer) -> None:
        """Ask the connectors to move KV; the pages stay fenced until an event ends the transfer."""
        if wish.id in self._transfers:
            raise EngineError(f"transfer {wish.id!r} is open already")
        self.pool.fence(wish.pages)
        self._transfers[wish.id] = wish
        self._wishes.append(wish)

    def _move(self) -> None:
        if not self._transfers:
            return
        wishes, self._wishes = self._wishes, []
        for event in self.hooks.ask_transfer(wishes):
            self._on_event(event)

    def _on_event(self, event: TransferEvent) -> None:
        wish = self._transfers.pop(event.transfer_id, None)
        if wish is None:
            self.counters.stray_events += 1
            return
        self.pool.unfence(wish.pages)
        self.ready(wish.request_id, f"transfer {wish.id}")

    # ---- to look at

    def why(self, request_id: str) -> tuple[Why, str] | None:
        """Why a waiting request got nothing in the last step; ``None`` if it is not waiting."""
        if request_id in self.parked:
            return Why.PARKED, ", ".join(sorted(self.parked[request_id].parked_on))
        request = self.requests.get(request_id)
        if request is None or request.state is not State.WAITING:
            return None
        if self._last is None:
            return Why.NOT_ASKED, ""
        return self._last.waits.get(request_id, (self._last.otherwise, ""))

    def stats(self) -> dict[str, int | float]:
        """Gauges of this moment and counters since the start."""
        numbers = self.kv.numbers()
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "parked": len(self.parked),
            "pages_total": numbers.total,
            "pages_free": numbers.free,
            "pages_evictable": numbers.evictable,
            "pages_pinned": numbers.pinned,
            **self.counters.flat(),
        }

    def describe(self) -> dict[str, Any]:
        """What was chosen and how large it is."""
        return self._description

    def check(self) -> None:
        """Audit every invariant of requests, plans and pages. Raises ``InvariantViolation``."""
        audit.check(self)

    def close(self) -> None:
        """End what is left, then close every plugin. Idempotent."""
        for request_id in list(self.requests):
            self.abort(request_id)
        plugins, self._plugins = self._plugins, []
        for plugin in reversed(plugins):
            plugin.close()

    # ---- inside

    def _delta(self, request: Request, tokens: Sequence[int]) -> Delta:
        num_prompt = request.num_prompt
        return Delta(
            request.id, tuple(tokens), request.finish, request.detail, request.cached_tokens, num_prompt,
            len(request.tokens) - num_prompt,
        )  # fmt: skip

    def _break_stall(self) -> None:
        """Work exists, nothing runs, and asking again did not help: end one request rather than hang in silence."""
        head = self.waiting.head() or self.running[-1]
        words = self.why(head.id) or (Why.PAGES, "")
        self.fail(head, f"cannot be scheduled although nothing else runs: {words[0]} {words[1]}".rstrip())
        self._idle_plans = 0
