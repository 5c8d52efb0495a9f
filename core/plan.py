"""What the loop exchanges in one step: a sealed ``Plan``, its ``Outcome``, and the small answers of the hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from engine.core.pooling import Vector
from engine.core.request import Finish, Request
from engine.core.sampling import TokenLogprobs


class Why(StrEnum):
    """Why a request got nothing in a step, or less than it owes. A closed vocabulary.

    Every waiting request has exactly one of these, and so has every running one that was passed over or cut.
    """

    TOKEN_BUDGET = "token_budget"  # the step's token budget is used up
    RUN_SLOTS = "run_slots"  # as many requests run as may
    PAGES = "pages"  # not enough free and evictable KV pages
    RESERVE = "reserve"  # pages exist, but are reserved for the future decode of those that run
    PREFILL_BUDGET = "prefill_budget"  # the scheduler's own limit on prefill work, of a step or of one request in it
    DELAY = "delay"  # prefill is held back for a few steps, so that more of it shares a batch
    CHUNK = "chunk"  # another request's prompt is being computed in chunks
    PREEMPTION = "preemption"  # somebody was preempted in this step: nobody is admitted
    ADAPTERS = "adapters"  # as many adapters are at work as may
    PREFIX = "prefix"  # waits for a sibling to fill the prefix cache for it
    BEHIND = "behind"  # not reached: the queue stopped at one before it
    NOT_ASKED = "not_asked"  # the scheduler did not look at the queue in this step
    ORDER = "order"  # left out by the order hook
    POLICY = "policy"  # a policy objected (its words are beside it)
    PARKED = "parked"  # not ready: grammar, adapter or remote KV
    NOTHING_OWED = "nothing_owed"  # all its known tokens are computed or planned


class Wait(NamedTuple):
    """An ``admit`` answer: not now. ``reason`` is shown to whoever asks why the request waits."""

    reason: str


class Reject(NamedTuple):
    """An ``admit`` answer: never. The request ends with an error that carries ``reason``."""

    reason: str


class Room(NamedTuple):
    """What a scheduler's check sees when a request is about to start (all page counts in pages).

    ``available`` counts pages that are free or could be evicted *before* the matched prefix is pinned; pinning takes
    ``idle`` of them away, since the prefix's pages can no longer be evicted. A ledger must hold on both sides.
    """

    hit: int  # tokens that the prefix cache gives
    owed: int  # tokens left to compute after the hit
    available: int
    idle: int
    page_size: int

    @property
    def pinned_available(self) -> int:
        """Pages left once the prefix is pinned."""
        return self.available - self.idle


class KVNumbers(NamedTuple):
    """Page counts of the pool at this moment. ``free + evictable + pinned = total``."""

    total: int
    free: int
    evictable: int
    pinned: int
    page_size: int

    @property
    def available(self) -> int:
        """Pages that a grant could take: free ones and idle cached ones."""
        return self.free + self.evictable


class Candidate(NamedTuple):
    """Something that ``evict`` may give up: a cached page or tree node, or (kind ``running``) a request.

    ``key`` is what to return; ``pages`` how many pages it would yield; ``last_used`` grows with use.
    """

    key: object
    pages: int
    last_used: int
    request: Request | None = None


@dataclass(frozen=True, slots=True)
class EvictionPool:
    """What ``evict`` chooses from.

    ``kind`` is ``cache`` (idle cached pages; answer keys to drop) or ``running`` (answer whom to preempt, best victim
    first). ``candidates()`` lists the choices in the default's order; it costs time in proportion to their number.
    """

    kind: Literal["cache", "running"]
    candidates: Callable[[], Sequence[Candidate]]
    needy: Request | None = None  # kind running: on whose behalf


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's work, sealed. Parallel tuples: row i is ``requests[i]`` computing ``counts[i]`` tokens from position
    ``starts[i]``; where ``samples[i]`` is true the row reaches the end of the known tokens and yields a new one. Tokens
    beyond the known ones are the row's ``drafts``. Rows in ``pooled`` yield no token, but what ``Outcome.pooled`` says.

    Every token of a plan is backed by a page: ``starts[i] + counts[i] <= len(tables[i]) * page_size``. Executors read
    the tables from here and not from the request, which may have been aborted since.
    """

    index: int
    requests: tuple[Request, ...]
    epochs: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    samples: tuple[bool, ...]
    tables: tuple[list[int], ...]  # page tables as of now: a request that gives up its pages gets a new list
    admitted: tuple[Request, ...] = ()  # started in this step, in order (first time or resumed)
    preempted: tuple[Request, ...] = ()  # gave up their pages in this step, in order
    evicted_pages: int = 0
    waits: Mapping[str, tuple[Why, str]] = field(default_factory=dict)  # request id -> reason, words
    otherwise: Why = Why.NOT_ASKED  # the reason of waiting requests that ``waits`` does not name
    mode: str = "mixed"  # the scheduler's word for the batch: extend, decode, mixed, idle
    page_size: int = 1
    cuts: Mapping[str, Why] = field(default_factory=dict)  # request id -> why its row computes less than it owes
    drafts: Mapping[Request, tuple[int, ...]] = field(default_factory=dict)  # verified by its row; -1: see NO_DRAFT
    pooled: tuple[int, ...] = ()  # rows of requests that pool: they never sample
    awaits: tuple[int, ...] = ()  # overlap: row of the plan before whose tokens this row continues, or -1; else empty

    @property
    def common_prefix_pages(self) -> int:
        """Pages at the front that all rows share and have computed: what cascade attention reads once.

        Source: vLLM's count of common prefix blocks, which asks it of all that run.
        """
        if not self.requests:
            return 0
        first, last = min(self.tables), max(self.tables)  # what these two share, all others share
        limit = min(len(first), min(self.starts) // self.page_size)
        return next((at for at in range(limit) if first[at] != last[at]), limit)

    def pooled_positions(self, row: int) -> range:
        """Positions of the sequence whose hidden states a row in ``pooled`` brings the sum of: maybe none."""
        request, start = self.requests[row], self.starts[row]
        assert request.pooling is not None
        return request.pooling.positions(start, start + self.counts[row], request.num_prompt)

    @property
    def total_tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(self.counts)

    def __bool__(self) -> bool:
        return bool(self.requests)


@dataclass(slots=True)
class Outcome:
    """What came of a plan. The executor fills ``tokens`` and ``errors``; the core fills the rest before ``commit``.

    ``tokens[i]`` are the tokens that row i produced (empty where the row does not sample). ``errors`` names rows that
    failed alone: their requests end, the others' results stand. A row that verifies d drafts yields the accepted ones
    and one more, so 1 … d + 1 tokens. ``proposals`` are drafts for the next step, by row.

    ``logprobs`` has, by row, one entry for each token of a request that asked for them (``SamplingParams.logprobs``).
    ``prompt_logprobs`` has, by row, an entry for each prompt token whose predecessor the row computed, in order: the
    tokens from position ``starts[i] + 1`` on. Both are for executors that say so (``Executor.sampling``).

    ``pooled`` has, by row, the sum of the hidden states (the last layer's, after the final norm) of the positions that
    a row with ``mean`` pooling computed; and that of the last position alone for the row that completes the prompt of a
    request with ``last``. Float32 arrays of ``ModelInfo.hidden_size`` finite numbers, for executors that say so
    (``Executor.pooling``).
    """

    plan: Plan
    tokens: Sequence[Sequence[int]]
    errors: Mapping[int, str] = field(default_factory=dict)
    proposals: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    finished: tuple[Request, ...] = ()  # ended by this step, in plan order
    dropped: tuple[int, ...] = ()  # rows whose request was preempted or ended meanwhile: late, ignored
    logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    pooled: Mapping[int, Vector] = field(default_factory=dict)


NO_DRAFT = -1
"""Stands where a draft is planned but unknown. An executor that drafts puts in its own; else it never matches."""

TransferKind = Literal["probe", "pull", "push", "cancel"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A wish to move KV. ``pages`` stay fenced (neither reused nor evicted) until an event ends the transfer.

    ``probe``: how long a prefix of ``keys`` is there? Ends with ``found`` or ``failed``. ``pull``: fill ``pages`` with
    what is under ``keys``, one a page. ``push``: keep ``pages`` under ``keys``. Both end with ``done`` or ``failed``.
    ``cancel``: nobody waits any more for the transfer ``of``. A cancel is not answered; it may hasten that transfer's
    end, which is still to be told: not before the pages are safe from it. Of a probe that was answered (only connectors
    that ``hold`` are told): what it found is not wanted.

    ``hints`` is what the request's metadata says under names that begin with ``kv_``.
    """

    id: str
    kind: TransferKind
    request_id: str
    pages: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()
    to: str = ""  # the connector that it is for; empty: all of them
    of: str = ""  # of a cancel: the transfer's id
    hints: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """What became of a transfer: ``found`` (tokens available elsewhere), ``done``, or ``failed`` with a reason.

    ``failed_pages`` of a pull are those that were not filled; the pages before the first of them are used. A ``failed``
    pull that names none has filled none. One that is ``done`` and names some ended as it was meant to, e.g. when its
    time was up: that is no fault.

    ``costs`` of a ``found``: what loading would take, as far as the connector knows: (tokens, seconds) of beginnings of
    what it found, both rising. Empty: the core goes by what it measured itself.
    """

    transfer_id: str
    kind: Literal["found", "done", "failed"]
    tokens: int = 0
    failed_pages: tuple[int, ...] = ()
    reason: str = ""
    costs: tuple[tuple[int, float], ...] = ()


class Delta(NamedTuple):
    """New output of one request after a step: what a frontend streams."""

    request_id: str
    tokens: tuple[int, ...]
    finish: Finish | None = None
    detail: str | None = None
    cached_tokens: int = 0
    num_prompt: int = 0
    num_output: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # of ``tokens``, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first token, if asked for: from the second token on
    vector: bytes = b""  # with the end of a request that pools: float32, little-endian
