"""``unified``: one token budget, no phases. Source: the vLLM V1 scheduler.

Every request owes tokens: known ones without KV. Prefill, chunk and decode are the same act of paying that debt. Those
that run are paid first, in order of admission; when pages are short the last admitted gives its up. Then the queue is
served strictly from its head, a cached prefix being paid for already. A step that preempted admits nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import Field

from engine.core.errors import ConfigError
from engine.core.hookspecs import hookimpl
from engine.core.plan import EvictionPool, Plan, Room, Why
from engine.core.protocols import Context, PluginOptions, Scheduler
from engine.core.request import Request, State
from engine.core.step import Step


class UnifiedScheduler(Scheduler):
    """Running first, then the queue, all out of one budget."""

    name = "unified"
    aliases = ("vllm",)

    class Options(PluginOptions):
        policy: Literal["fcfs", "priority"] = Field("fcfs", description="order of the queue and choice of victims")
        enable_chunked_prefill: bool = Field(True, description="a prompt may be computed over several steps")
        long_prefill_token_threshold: int = Field(0, ge=0, description="most tokens of one request a step (0: no cap)")
        reserve_full_sequence: bool = Field(True, description="admit only what fits whole, not just its first chunk")
        num_spec_tokens: int = Field(0, ge=0, description="drafts that the executor proposes a step, at most")
        num_lookahead_tokens: int = Field(0, ge=0, description="pages are taken for so many tokens more (drafters)")
        max_adapters: int = Field(0, ge=0, description="most adapters among those that run (0: no limit)")
        watermark: float = Field(0.0, ge=0, lt=1, description="share of the pool kept free at admission")

    def start(self, context: Context) -> None:
        limits = context.limits
        if not self.options.enable_chunked_prefill and limits.max_batch_tokens < limits.max_model_len - 1:
            raise ConfigError(
                f"scheduler unified: without chunked prefill max_batch_tokens ({limits.max_batch_tokens}) must hold "
                f"the longest prompt ({limits.max_model_len - 1} tokens)"
            )
        self._max_len = limits.max_model_len
        self._lookahead: int = self.options.num_lookahead_tokens
        self._drafts: int = self.options.num_spec_tokens
        self._cap: int = self.options.long_prefill_token_threshold or limits.max_batch_tokens
        # vLLM takes the share of all its pages, of which one is never used: ours are those that are.
        self._watermark = int(self.options.watermark * (limits.num_pages + 1))

    @hookimpl
    def plan(self, step: Step) -> Plan:
        """Pay the running, then admit."""
        self._serve_running(step)
        if step.preempted:
            return step.seal(otherwise=Why.PREEMPTION, drafting=self._drafts)
        if step.budget <= 0:
            return step.seal(otherwise=Why.TOKEN_BUDGET, drafting=self._drafts)
        if step.slots <= 0:
            return step.seal(otherwise=Why.RUN_SLOTS, drafting=self._drafts)
        padding = self._padding(step)
        adapters = self._adapters(step)
        for request in step.queue():
            if self._crowded(request, adapters):  # those behind it may use what is at work already
                step.note(request, Why.ADAPTERS)
                continue
            check = self._check(step, request, padding)
            if not step.start(request, check, lookahead=self._lookahead, padding=padding):
                break
            adapters |= {request.adapter} - {""}
        return step.seal(drafting=self._drafts)

    def queue_key(self) -> Callable[[Request], Any] | None:
        """By priority, then arrival; or as it stands."""
        return None if self.options.policy == "fcfs" else _urgency

    @hookimpl
    def evict(self, pool: EvictionPool) -> Sequence[object] | None:
        """Whom to preempt: the last admitted, or the least urgent."""
        if pool.kind != "running":
            return None
        candidates = pool.candidates()  # the last admitted first
        if self.options.policy == "fcfs" or not candidates:
            return [candidate.key for candidate in candidates[:1]]
        worst = max(
            reversed(candidates), key=lambda c: (c.request.priority, c.request.arrival) if c.request else (0, 0.0)
        )
        return [worst.key]

    def _serve_running(self, step: Step) -> None:
        running = list(step.running)
        at = 0
        while at < len(running) and step.budget > 0:
            if not self._lookahead:  # the fast way asks for no more pages than the token needs
                at = step.grant_decodes(running, at)
            if at < len(running) and not self._serve(step, running[at]):
                return
            at += 1

    def _serve(self, step: Step, request: Request) -> bool:
        """Grant one request what it owes, preempting until it fits; False ends the round of the running."""
        room = self._max_len - 1 - request.planned
        owed = min(request.debt, self._cap, step.budget, room)  # a victim's tokens go to those behind, not in here
        if request.state is not State.RUNNING or not owed:
            return True
        while not step.grant(request, owed, self._lookahead):
            if step.refused is not Why.PAGES:
                return False
            victim = step.preempt(request)
            if victim is None or victim is request:
                return False
        return True

    def _adapters(self, step: Step) -> set[str]:
        """Adapters of those that run."""
        return {request.adapter for request in step.running if request.adapter} if self.options.max_adapters else set()

    def _crowded(self, request: Request, adapters: set[str]) -> bool:
        limit: int = self.options.max_adapters
        return bool(limit and request.adapter and request.adapter not in adapters and len(adapters) >= limit)

    def _padding(self, step: Step) -> int:
        """Drafts that a request owing one token is admitted with, so that all rows of a decode batch look alike."""
        if not self._drafts:
            return 0
        starts = {request: request.planned - step.granted(request) for request in step.running}
        granted = [request for request, start in starts.items() if start < request.planned]
        if not granted or any(starts[request] < request.prefill_target for request in granted):
            return 0
        return self._drafts

    def _check(self, step: Step, request: Request, padding: int) -> Callable[[Room], int | Why]:
        def decide(room: Room) -> int | Why:
            tokens = min(room.owed, self._cap)
            if padding and room.owed == 1:
                tokens = 1 + padding
                if tokens > step.budget or room.hit + tokens > self._max_len:
                    return Why.TOKEN_BUDGET
            if tokens > step.budget and not self.options.enable_chunked_prefill:
                return Why.TOKEN_BUDGET
            tokens = min(tokens, step.budget)
            if tokens <= 0:
                return Why.TOKEN_BUDGET
            reach = min(room.hit + tokens + self._lookahead, self._max_len)
            if self.options.reserve_full_sequence:
                reach = max(reach, request.num_tokens)
            need = -(-reach // room.page_size) - room.hit // room.page_size
            spare = self._watermark if step.running else 0
            return tokens if need + spare <= room.pinned_available else Why.PAGES

        return decide


def _urgency(request: Request) -> tuple[int, float, str]:
    return request.priority, request.arrival, request.id
