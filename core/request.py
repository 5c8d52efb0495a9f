"""A request as the engine core sees it: tokens, progress, and the pages that hold its KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine.core.grammar import Guide
from engine.core.identity import pack, page_digests
from engine.core.pooling import Pooling, Total
from engine.core.sampling import SamplingParams as SamplingParams
from engine.core.sampling import TokenLogprobs


class State(StrEnum):
    """Where a request is. Only the core moves it."""

    WAITING = "waiting"  # in the queue, holds no page
    PARKED = "parked"  # not ready (grammar, adapter, remote KV): outside the queue, holds no run slot
    RUNNING = "running"  # admitted, holds pages
    FINISHED = "finished"


class Finish(StrEnum):
    """Why a request ended. ``detail`` on the request says more where there is more to say."""

    STOP = "stop"  # end-of-sequence, stop token or stop string; of a request that pools: its vector is there
    LENGTH = "length"  # max_tokens, the model's length, or the whole KV pool (detail: kv_capacity)
    ABORT = "abort"  # the client left or cancelled
    TIMEOUT = "timeout"  # its deadline passed, or it waited for too long (detail: which, and how long)
    ERROR = "error"  # the engine could not go on with it (detail: the diagnosis)


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to generate, or (``pooling``) to make a vector of. Plugins read it; only the core writes it (except
    the two scratch slots).

    Token counts: ``num_tokens`` are known (prompt and committed output); ``computed`` of them have KV in ``pages``;
    up to ``planned`` the steps in flight compute. In overlap mode those steps will also yield ``pending`` tokens that
    nobody knows yet. What is left to compute is the *token debt*: a prompt that was just admitted owes its uncached
    suffix, a decoding request owes one (Source: vLLM V1's unified scheduler and its output placeholders).
    """

    id: str
    tokens: list[int]  # prompt, then output; append only
    num_prompt: int
    params: SamplingParams  # of one that pools: the defaults, they mean nothing
    max_total: int  # num_tokens never exceeds this
    capped: bool = False  # it could be longer, but the KV pool does not hold more
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence included unless ignored
    namespace: bytes = b""  # digest of all that makes equal tokens unequal KV (model, dtype, adapter, salt)
    adapter: str = ""  # what changes the model's weights for it
    salt: str = ""  # separates its cached content from that of equal tokens
    priority: int = 0  # smaller is more urgent
    arrival: float = 0.0  # seconds on the engine's clock
    arrival_index: int = 0  # order of arrival, unique
    entry_index: int = 0  # order of entering the queue, unique; a preempted request enters anew
    read_cache: bool = True  # whether its prefix may come from the cache
    write_cache: bool = True  # whether others may find what it computes, here or through a connector
    cache_ttl: float | None = None  # seconds that they may find it for, from when it last wrote; None: no limit
    deadline: float | None = None  # when it is worth nothing any more, in seconds on the engine's clock
    packed: bytes = field(default=b"", repr=False)  # the prompt's token ids, four bytes each: see ``packed_tokens``
    metadata: Mapping[str, Any] = field(default_factory=dict)  # tenant, deadline, …: for policies

    state: State = State.WAITING
    parked_on: set[str] = field(default_factory=set)
    pages: list[int] = field(default_factory=list)  # page table: grows by appending, any other change is a new list
    computed: int = 0
    planned: int = 0  # never below ``computed``; equal to it when no step is in flight
    pending: int = 0  # overlap mode: tokens that steps in flight will yield, drafts counted as accepted; 0 otherwise
    quiet: int = 0  # planning the decode of positions below this one concerns nobody else: the core's short cut
    drafts: tuple[int, ...] = ()  # proposed tokens to verify when it is next planned
    lagging: bool = False  # accepted drafts completed pages that are not published yet
    prefill_target: int = 0  # num_tokens at admission: up to here the request prefills
    epoch: int = 0  # grows with each preemption and at the end: late results of older epochs are dropped
    started: float | None = None  # when it was first admitted, in seconds on the engine's clock
    cached_tokens: int = 0  # tokens the prefix cache gave at the first admission
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)  # from the second token on, if asked
    pooling: Pooling | None = None  # it ends with a vector when its prompt is computed, and yields no token
    pooled: Total | None = field(default=None, repr=False)  # the sum of what its rows brought since it started
    guide: Guide | None = field(default=None, repr=False)  # of its grammar: whoever executes asks it what may follow
    preemptions: int = 0
    finish: Finish | None = None
    detail: str | None = None  # more about the finish; for STOP by token, the token id

    kv_state: Any = None  # scratch of the KV cache
    sched_state: Any = None  # scratch of the scheduler

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and committed output."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def prompt(self) -> list[int]:
        """A copy of the prompt's token ids."""
        return self.tokens[: self.num_prompt]

    @property
    def output(self) -> list[int]:
        """A copy of the committed output's token ids."""
        return self.tokens[self.num_prompt :]

    def __post_init__(self) -> None:
        if len(self.packed) != 4 * self.num_prompt:
            self.packed = pack(self.tokens[: self.num_prompt])

    def packed_tokens(self, start: int, end: int) -> bytes:
        """Token ids from ``start`` up to ``end`` as 32-bit little-endian integers: what caches compare and digest."""
        if end <= self.num_prompt:
            return self.packed[4 * start : 4 * end]
        return pack(self.tokens[start:end])

    def digest_pages(self, digests: list[bytes], count: int, page_size: int) -> None:
        """Go on with ``digests``, those of its first pages, until ``count`` or more are known. Mutates the list."""
        known = len(digests)
        if known < count:
            parent = digests[-1] if digests else self.namespace
            digests += page_digests(parent, self.packed_tokens(known * page_size, count * page_size), page_size)

    @property
    def in_flight(self) -> int:
        """Tokens that are planned and not yet committed."""
        return self.planned - self.computed

    @property
    def debt(self) -> int:
        """Tokens still to plan: those without KV that no step in flight computes, and drafts to verify.

        None where what is in flight certainly brings the request to its longest.
        """
        pending = self.pending
        if pending and self.planned + 2 - pending >= self.max_total:
            return 0
        return len(self.tokens) + pending + len(self.drafts) - self.planned

    @property
    def max_new(self) -> int:
        """Most output tokens this request may still have in all (``max_tokens`` after the length limits)."""
        return self.max_total - self.num_prompt

    @property
    def finished(self) -> bool:
        """True once the request has ended, for whatever reason."""
        return self.state is State.FINISHED

    def __repr__(self) -> str:
        return (
            f"<Request {self.id} {self.state} prompt={self.num_prompt} output={self.num_output} "
            f"computed={self.computed}+{self.in_flight} pages={len(self.pages)}>"
        )
