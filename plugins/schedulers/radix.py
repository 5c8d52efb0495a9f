"""``radix``: prefill first, else decode, behind an admission ledger. Source: the SGLang scheduler.

Each step is one of two batches. If the ledger lets anybody in (or a long prompt is being computed in chunks), the step
is a prefill batch. Otherwise all that run decode one token; when pages are short for that, some are retracted to the
back of the queue. The ledger reserves pages for the future output of those that run, estimated as a ratio of what they
may still generate; the ratio decays while all goes well and is measured anew after a retraction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pydantic import Field

from engine.core.errors import ConfigError
from engine.core.hookspecs import hookimpl
from engine.core.plan import EvictionPool, Outcome, Plan, Room, Why
from engine.core.protocols import Context, PluginOptions, Scheduler
from engine.core.request import Request, State
from engine.core.step import Step
from engine.plugins.schedulers._radix_policy import PolicyName, QueueOrder

CLIP_NEW_TOKENS = 4096  # nobody reserves more output than this
INIT_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_STEPS = 20  # after a retraction, room for so many more decode steps is assumed


class RadixScheduler(Scheduler):
    """Prefill first under a ledger, decode otherwise, retract when short."""

    name = "radix"
    aliases = ("sglang",)

    class Options(PluginOptions):
        policy: PolicyName = Field(
            "fcfs",
            description="queue order: as they came, longest cached prefix, the cache's tree depth first, longest "
            "output, random, the routing key that most of the running share",
        )
        enable_priority_scheduling: bool = Field(False, description="the requests' priority goes before the policy")
        chunked_prefill_size: int | None = Field(
            None, description="most prompt tokens a step; -1: prompts are never cut (default: max_batch_tokens)"
        )
        max_prefill_tokens: int = Field(16384, ge=1, description="prompt tokens after which a prefill batch is closed")
        enable_mixed_chunk: bool = Field(False, description="decodes ride along in prefill batches")
        schedule_conservativeness: float = Field(1.0, gt=0, description="above 1 admits less, below 1 more")
        seed: int = Field(0, description="of policy random")

    def start(self, context: Context) -> None:
        limits = context.limits
        size = self.options.chunked_prefill_size
        if limits.max_batch_tokens < limits.max_running:
            raise ConfigError(
                f"scheduler radix: a decode batch holds all that run, so max_batch_tokens ({limits.max_batch_tokens}) "
                f"must be at least max_running ({limits.max_running})"
            )
        if size == -1 and limits.max_batch_tokens < limits.max_model_len - 1:
            raise ConfigError(
                f"scheduler radix: without chunked prefill max_batch_tokens ({limits.max_batch_tokens}) must hold "
                f"the longest prompt ({limits.max_model_len - 1} tokens)"
            )
        self.limits = limits
        self.chunk_size = None if size == -1 else min(size or limits.max_batch_tokens, limits.max_batch_tokens)
        if self.chunk_size is not None and self.chunk_size < limits.page_size:
            raise ConfigError(
                f"scheduler radix: chunks are whole pages, so chunked_prefill_size and max_batch_tokens must be at "
                f"least the page size {limits.page_size}; {self.chunk_size} is below it"
            )
        self.decoding: list[Request] = []  # those that decode, in batch order
        self.chunked: Request | None = None  # the one whose prompt is being computed in chunks
        self.init_ratio = min(INIT_RATIO * self.options.schedule_conservativeness, 1.0)
        self.min_ratio = self.init_ratio * MIN_RATIO_FACTOR
        self.new_token_ratio = self.init_ratio
        self.queue_order = QueueOrder(
            self.options.policy, priorities=self.options.enable_priority_scheduling, seed=self.options.seed
        )

    # ---- hooks

    @hookimpl
    def plan(self, step: Step) -> Plan:
        """A prefill batch if there is one, else a decode batch."""
        self._prefill(step)
        if step.tokens_planned:
            prefill = step.tokens_planned
            if self.options.enable_mixed_chunk:
                self._grant_decodes(step)
            return step.seal("mixed" if step.tokens_planned > prefill else "extend")
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
        decoding = set(self.decoding)
        able = [c.request for c in pool.candidates() if c.request in decoding and c.request is not None]
        place = {request: number for number, request in enumerate(self.decoding)}
        return sorted(able, key=lambda r: (r.num_output, -r.num_prompt, -place[r]))

    @hookimpl
    def commit(self, outcome: Outcome) -> None:
        """Prompts that are complete join the decode batch; those that ended leave it."""
        if outcome.finished:
            self.decoding = [request for request in self.decoding if not request.finished]
            if self.chunked is not None and self.chunked.finished:
                self.chunked = None
        if outcome.plan.mode in ("extend", "mixed"):
            present = set(self.decoding)
            for request in outcome.plan.requests:
                if request.state is State.RUNNING and request is not self.chunked and request not in present:
                    self.decoding.append(request)

    def on_preempt(self, request: Request) -> None:
        """Retracted: out of the batch."""
        self.on_end(request)

    def on_end(self, request: Request) -> None:
        """Out of the batch."""
        if request is self.chunked:
            self.chunked = None
        elif request in self.decoding:
            self.decoding.remove(request)

    # ---- the two batches

    def _prefill(self, step: Step) -> None:
        if self.chunked is None and (step.slots <= 0 or not step.waiting):
            return
        ledger = Ledger(self, step)
        if self.chunked is not None:
            tokens = step.grant(self.chunked, ledger.chunk_left)
            if not tokens:
                return  # short of pages: let the decoding ones finish first
            ledger.charge_chunk(tokens)
            if not self.chunked.debt:
                self.chunked = None
        if step.slots <= 0 or ledger.closed:
            return
        for request in step.queue():
            if not step.start(request, ledger.checking(request)):
                break
            ledger.charge(request, step.granted(request))
            if request.debt:
                self.chunked = request
            if ledger.closed:
                break

    def _decode(self, step: Step) -> None:
        retracted = self._make_room(step)
        self._grant_decodes(step)
        if not retracted and self.decoding:
            decay = (self.init_ratio - self.min_ratio) / DECAY_STEPS
            self.new_token_ratio = max(self.new_token_ratio - decay, self.min_ratio)

    def _grant_decodes(self, step: Step) -> None:
        """One token for each that decodes; drafts are left alone, and who finds no page waits."""
        at = step.grant_decodes(self.decoding)
        while at < len(self.decoding):
            step.grant(self.decoding[at], 1)
            at = step.grant_decodes(self.decoding, at + 1)

    def _make_room(self, step: Step) -> bool:
        """Retract until every decoding request can have its next page; keeps one unless a chunk is pending."""
        size = self.limits.page_size
        retracted = False
        while self.decoding and sum(not r.computed % size for r in self.decoding) > step.kv.available:
            if len(self.decoding) == 1 and self.chunked is None:
                break
            if step.preempt(front=False) is None:
                break
            retracted = True
        if retracted and self.decoding:
            generated = sum(request.num_output for request in self.decoding)
            may = sum(request.max_new for request in self.decoding)
            self.new_token_ratio = min(1.0, (generated + RETRACT_STEPS * len(self.decoding)) / (may + 1))
        return retracted


class Ledger:
    """The books of one prefill batch, in tokens: total room less reservations, the input budget, the chunk budget."""

    def __init__(self, scheduler: RadixScheduler, step: Step) -> None:
        self._scheduler = scheduler
        self._step = step
        self._page = scheduler.limits.page_size
        ride = len(scheduler.decoding) if scheduler.options.enable_mixed_chunk else 0
        self.chunk_left = step.budget - ride if scheduler.chunk_size is None else scheduler.chunk_size - ride
        self._chunking = scheduler.chunk_size is not None
        self._input_left: int = scheduler.options.max_prefill_tokens - ride
        self._empty = True
        ratio = scheduler.new_token_ratio
        self._reserved = ride + sum(self.future(request) * ratio for request in scheduler.decoding)

    @property
    def closed(self) -> bool:
        """No further request may join."""
        return self._step.budget <= 0 or self._input_left <= 0 or (self._chunking and self.chunk_left <= 0)

    def future(self, request: Request) -> int:
        """Output tokens that the request may still generate, as far as anybody reserves for them."""
        pool = self._scheduler.limits.pool_tokens
        fits = max(0, pool - self._ceil(request.num_prompt) - self._page - 1)
        return max(0, min(request.max_new, fits) - request.num_output)

    def checking(self, request: Request) -> Callable[[Room], int | Why]:
        """The check of one candidate, as ``step.start`` wants it."""
        return partial(self.decide, request)

    def decide(self, request: Request, room: Room) -> int | Why:
        """Tokens to grant, or why none."""
        alone = self._empty and not self._step.running
        wanted = room.owed + min(self.future(request), CLIP_NEW_TOKENS) + self._page
        # Pinning takes the prefix out of what can be evicted, so the sum is asked on both sides of the pin.
        for pages in (room.available, room.pinned_available):
            if not alone and wanted >= pages * self._page - self._reserved:
                return Why.RESERVE
        if not self._chunking:
            if not self._empty and self._ceil(room.owed) >= self._input_left:
                return Why.PREFILL_BUDGET
            return room.owed if room.owed <= self._step.budget else Why.TOKEN_BUDGET
        if room.owed <= self.chunk_left:
            return room.owed
        if self._scheduler.chunked is not None:
            return Why.CHUNK
        cut = self.chunk_left // self._page * self._page
        return cut if cut > 0 else Why.PREFILL_BUDGET

    def charge(self, request: Request, tokens: int) -> None:
        """A request joined: its pages are taken already, its future output is reserved."""
        self._empty = False
        self._input_left -= self._ceil(tokens)
        self.chunk_left -= tokens
        if not request.debt:
            self._reserved += min(self.future(request), CLIP_NEW_TOKENS) + self._page

    def charge_chunk(self, tokens: int) -> None:
        """The prompt in progress took its next chunk."""
        self._empty = False
        self._input_left -= self._ceil(tokens)
        self.chunk_left -= tokens

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page
