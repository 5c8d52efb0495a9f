"""``radix``: prefill first, else decode, behind an admission ledger. Source: the SGLang scheduler.

Each step is one of two batches. If the ledger lets anybody in (or a long prompt is being computed in chunks), the step
is a prefill batch. Otherwise all that run decode one token; when pages are short for that, some are retracted to the
back of the queue. The state, in one picture:

    waiting ── ledger ──▶ last batch ── next step ──▶ batch (decodes) ──▶ finished
       ▲                   │     ▲                      │
       │                chunked: one prompt,            │ retracted (no pages), preempted (priority)
       └────────────────── stays until complete ────────┘

``full`` remembers that nobody fits, so that the queue is not tried again before somebody leaves the batch. The ledger
reserves KV for the future output of those that run, by a ratio that decays while all goes well and is measured anew
after a retraction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from engine.core.hookspecs import hookimpl
from engine.core.plan import EvictionPool, Plan, Room, Why
from engine.core.protocols import Context, Scheduler
from engine.core.request import Request, State
from engine.core.step import Step
from engine.plugins.schedulers._prefill_delayer import PrefillDelayer
from engine.plugins.schedulers._radix_ledger import Ledger, Resource
from engine.plugins.schedulers._radix_options import RadixOptions, chunk_size
from engine.plugins.schedulers._radix_policy import QueueOrder

INIT_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_STEPS = 20  # after a retraction, room for so many more decode steps is assumed


class RadixScheduler(Scheduler):
    """Prefill first under a ledger, decode otherwise, retract when short.

    Attributes:
        batch: those that decode, in order; who finished stays, and holds its row, until the next decode.
        last: the prefill batch of the last step; it joins the batch at the next one.
        chunked: the request whose prompt is being computed in chunks, or ``None``.
        full: nobody fits; the queue is not tried before somebody leaves.
        new_token_ratio: the part of the output still allowed that is reserved for those that run.
        longest_streak: most prefill batches in a row while others could decode.
    """

    name = "radix"
    aliases = ("sglang",)
    Options = RadixOptions
    ledger_type = Ledger  # a subclass may keep other books

    def start(self, context: Context) -> None:
        """Raises ``ConfigError`` where batches would not hold what must go into one."""
        limits, options = context.limits, self.options
        self.limits = limits
        self.chunk_size = chunk_size(options, limits)
        self.batch: list[Request] = []
        self.last: list[Request] = []
        self.chunked: Request | None = None
        self.full = False
        self.init_ratio = min(INIT_RATIO * options.schedule_conservativeness, 1.0)
        self.min_ratio = self.init_ratio * MIN_RATIO_FACTOR
        self.new_token_ratio = self.init_ratio
        self.expires = options.waiting_timeout is not None or options.running_timeout is not None
        self.preempts = options.enable_priority_scheduling and not options.disable_priority_preemption
        self.delayer = PrefillDelayer(
            options.prefill_delay_passes, options.prefill_delay_queue_ratio, options.prefill_delay_low_usage
        )
        self.streak = 0  # prefill batches in a row while others could decode
        self.longest_streak = 0
        self.queue_order = QueueOrder(
            options.policy,
            priorities=options.enable_priority_scheduling,
            max_overtakings=options.max_overtakings if options.bound_starvation else None,
            seed=options.seed,
        )

    def resources(self, step: Step) -> Sequence[Resource]:
        """Memories beside the KV pool that admission must account for. For subclasses; none by default."""
        return ()

    # ---- hooks

    @hookimpl
    def plan(self, step: Step) -> Plan:
        """A prefill batch if there is one, else a decode batch."""
        if self.expires:
            step.expire(waiting=self.options.waiting_timeout, running=self.options.running_timeout)
        self._merge_last(step)
        if self._held_back(step):
            self._decode(step)
            return step.seal("decode", otherwise=Why.DELAY)
        if not self._decodes_are_due() and self._prefill(step):
            self.delayer.started(len(step.admitted))
            mode = "mixed" if self._ride_along(step) else "extend"
            self.streak = self.streak + 1 if self.batch else 0
            self.longest_streak = max(self.longest_streak, self.streak)
            return step.seal(mode)
        self.streak = 0
        self._decode(step)
        return step.seal("decode", otherwise=Why.RUN_SLOTS if step.slots <= 0 else None)

    @hookimpl
    def order(self, step: Step, waiting: Sequence[Request]) -> Sequence[Request] | None:
        """The policy's order; stable, so that equals keep theirs."""
        return self.queue_order.order(step, waiting)

    @hookimpl
    def evict(self, pool: EvictionPool) -> Sequence[object] | None:
        """Whom to retract: fewest tokens generated, then longest prompt, then the latest in the batch."""
        if pool.kind != "running":
            return None
        return self._retraction_order()

    def on_preempt(self, request: Request) -> None:
        """Back in the queue: out of the batch."""
        request.sched_state = None
        if request is self.chunked:
            self.chunked = None
        self.batch = [other for other in self.batch if other is not request]
        self.last = [other for other in self.last if other is not request]

    def on_end(self, request: Request) -> None:
        """Ended outside a commit: it counts in the batch until the next decode, as any that finished."""
        if request is self.chunked:
            self.chunked = None

    def stats(self) -> Mapping[str, int | float]:
        """The longest wait of those that decode, in prefill batches, and what is reserved of their future."""
        return {"longest_prefill_streak": self.longest_streak, "new_token_ratio": self.new_token_ratio}

    def on_idle(self) -> None:
        """An empty engine starts afresh."""
        self.batch, self.last, self.full = [], [], False
        self.new_token_ratio = self.init_ratio

    def displace(self, waiting: Iterable[Request], priority: int) -> Request | None:
        """With priorities the least urgent one goes, the latest among equals, if the newcomer is more urgent."""
        if not self.options.enable_priority_scheduling:
            return None
        least = max(waiting, key=lambda request: (request.priority, request.entry_index), default=None)
        return least if least is not None and least.priority > priority else None

    # ---- prefill

    def _merge_last(self, step: Step) -> None:
        """Those whose prompt was completed in the last step join the batch."""
        if self.chunked is not None and self.chunked.finished:  # its row failed
            self.chunked = None
        if self.chunked is not None:
            step.publish(self.chunked)
        joining = [r for r in self.last if r is not self.chunked and r.state is State.RUNNING]
        if len(joining) < len(self.last):
            self.full = False
        self.last = []
        if joining and not self.batch:
            self.full = False
        self.batch += joining

    def _prefill(self, step: Step) -> bool:
        """Fill a prefill batch; False where there is none."""
        if self.preempts:
            self.full = False
        if self.chunked is None:
            if self.full or not step.waiting:
                return False
            if self._rows(step) <= 0 and not self.preempts:
                self.full = True
                return False
        ledger = self._open(step)
        chunked = self.chunked
        if chunked is not None:
            tokens = step.grant(chunked, ledger.chunk(chunked.debt), defer=True)
            if not tokens:
                return False  # short of pages: let the decoding ones finish first
            ledger.charge(chunked, tokens, whole=not chunked.debt)
            if not chunked.debt:
                self.chunked = None
        self._admit(step, ledger)
        self.queue_order.started(step.admitted)
        self.last = ledger.joined
        return bool(ledger.joined)

    def _held_back(self, step: Step) -> bool:
        """Whether prefill waits for company; a prompt in progress goes on."""
        if not self.options.prefill_delay_passes or self.chunked is not None:
            return False
        kv = step.kv
        return self.delayer.holds(
            decoding=len(self.batch), slots=step.slots, waiting=step.waiting, usage=kv.pinned / kv.total
        )

    def _decodes_are_due(self) -> bool:
        options = self.options
        return bool(options.bound_starvation and self.batch and self.streak >= options.max_prefill_streak)

    def _open(self, step: Step) -> Ledger:
        options, page = self.options, self.limits.page_size
        return self.ledger_type(
            page_size=page,
            pool_tokens=self.limits.pool_tokens,
            available=lambda: (step.available + step.taken) * page,
            running=self.batch,
            ratio=self.new_token_ratio,
            input_tokens=options.max_prefill_tokens,
            chunk_tokens=self.chunk_size,
            riders=len(self.batch) if options.enable_mixed_chunk else 0,
            max_requests=options.prefill_max_requests,
            simulate=not step.caching,
            resources=self.resources(step),
        )

    def _rows(self, step: Step) -> int:
        """How many requests a prefill batch may hold: those that finished hold a row of the batch until the next
        decode, and a prompt in progress holds a slot beside its place in the batch."""
        return min(self.limits.max_running - len(self.batch), step.slots + len(step.admitted))

    def _admit(self, step: Step, ledger: Ledger) -> None:
        rows = self._rows(step)
        for request in step.queue():
            if len(ledger.joined) >= rows:
                self.full = True
            if self.full:
                if not (self.preempts and self._preempt_for(request, step, ledger)):
                    break
                rows = self._rows(step)
            tokens = step.start(request, partial(self._decide, step, ledger, request), defer=True)
            if not tokens:
                self.full = self.full or step.refused is Why.RESERVE
                break
            if tokens < request.sched_state:
                self.chunked = request
            ledger.charge(request, tokens, whole=tokens == request.sched_state)
            closed = ledger.closed()
            if closed is not None:
                self.full = self.full or closed is Why.RESERVE
                break

    def _decide(self, step: Step, ledger: Ledger, request: Request, room: Room) -> int | Why:
        request.sched_state = room.owed
        if step.override and not step.running:
            return room.owed if self.chunk_size is None else min(room.owed, self.chunk_size)
        answer = ledger.decide(request, room)
        if isinstance(answer, Why):
            return answer
        if answer < room.owed and self.chunked is not None:
            return Why.CHUNK
        if self.chunk_size is None and answer > step.budget:
            return Why.TOKEN_BUDGET
        return answer

    def _preempt_for(self, request: Request, step: Step, ledger: Ledger) -> bool:
        owed = request.num_tokens if request.sched_state is None else request.sched_state
        victims = ledger.victims(request, owed, self.options.priority_scheduling_preemption_threshold)
        left = len(self.batch)
        for victim in victims:
            if step.preempt(victim=victim, front=False) is None:
                continue
            left -= 1
            step.note(victim, Why.RUN_SLOTS, f"preempted for {request.id}")
            ledger.forgive(victim)
            self._clear(step, left)
        return bool(victims)

    def _ride_along(self, step: Step) -> bool:
        """Take the prefill batch's pages, and let the decodes ride along if they may. False: nobody rides."""
        page = self.limits.page_size
        if page > 1:
            step.free_up(-(-step.tokens_planned // page) + len(self.last))
        step.take_deferred()
        if not self.options.enable_mixed_chunk or not self.batch:
            return False
        self.batch = [request for request in self.batch if request.state is State.RUNNING]
        if not self.batch:
            return False
        before = step.tokens_planned
        step.free_up(len(self.batch))
        self._grant_decodes(step)
        self.last = [*self.last, *self.batch]
        self.batch = []
        return step.tokens_planned > before

    # ---- decode

    def _decode(self, step: Step) -> None:
        size = len(self.batch)
        self.batch = [request for request in self.batch if request.state is State.RUNNING]
        if not self.batch:
            self.full = False
            if not step.waiting and not step.running:
                self.on_idle()
            return
        if self._has_room(step, self.batch):
            decay = (self.init_ratio - self.min_ratio) / DECAY_STEPS
            self.new_token_ratio = max(self.new_token_ratio - decay, self.min_ratio)
        else:
            self._retract(step)
        if len(self.batch) < size:
            self.full = False
        step.free_up(len(self.batch))
        self._grant_decodes(step)

    def _grant_decodes(self, step: Step) -> None:
        """One token for each that decodes; drafts are left alone, and who finds no page waits."""
        at = step.grant_decodes(self.batch)
        while at < len(self.batch):
            step.grant(self.batch[at], 1)
            at = step.grant_decodes(self.batch, at + 1)

    def _has_room(self, step: Step, requests: Sequence[Request]) -> bool:
        """Whether each that needs its next page can have it; evicts what is missing."""
        page = self.limits.page_size
        if len(requests) <= step.kv.free:
            return True
        return step.free_up(sum(not request.planned % page for request in requests))

    def _clear(self, step: Step, left: int) -> None:
        """Somebody gave up pages because memory is short: free it for some steps of those that are left."""
        step.free_up(-(-left * RETRACT_STEPS // self.limits.page_size))

    def _retract(self, step: Step) -> None:
        """Retract until the rest can go on; one is kept. What is left says how much output to reserve for."""
        self.batch = list(reversed(self._retraction_order()))
        while len(self.batch) > 1 or self.chunked is not None:
            if step.preempt(front=False) is None:
                break
            self._clear(step, len(self.batch))
            if self._has_room(step, self.batch):
                break
        if self.batch:
            generated = sum(request.num_output for request in self.batch)
            may = sum(request.max_new for request in self.batch)
            self.new_token_ratio = min(1.0, (generated + RETRACT_STEPS * len(self.batch)) / (may + 1))

    def _retraction_order(self) -> list[Request]:
        by_priority = self.options.retraction_policy == "priority"
        place = {request: number for number, request in enumerate(self.batch)}
        return sorted(
            self.batch,
            key=lambda r: (-r.priority if by_priority else 0, r.num_output, -r.num_prompt, -place[r]),
        )
