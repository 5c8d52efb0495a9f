"""The books of one prefill batch: what may still join it. Source: SGLang's prefill admission.

Four budgets, in tokens. *Total*: free and evictable KV, less what the batch takes and less what those that run may
still generate, as far as the ratio expects them to. *Current*: the same without anybody's future. *Input*: what one
prefill batch may compute. *Chunk*: what one step may compute, where prompts are cut. Beside the KV pool a model may
have other memories that run short (window pages, recurrent states): each is one more ``Resource``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from engine.core.plan import Room, Why
from engine.core.request import Request

CLIP_NEW_TOKENS = 4096  # nobody reserves more output than this
NO_EOS_RESERVE = 1  # tokens a request kept free when the future is simulated


class Resource(Protocol):
    """A memory beside the KV pool that admission must account for."""

    def remaining(self) -> float:
        """What is left, after all that was charged. At 0 or below nobody joins any more."""

    def need(self, request: Request, tokens: int) -> float:
        """What the request may come to need when ``tokens`` of it are computed; it must be at most what remains."""

    def charge(self, request: Request, tokens: int) -> None:
        """The request joined, or went on, with so many tokens. Mutates."""


class Account:
    """One budget over the KV pool: what the pool has at this moment, less an offset."""

    __slots__ = ("_available", "offset")

    def __init__(self, available: Callable[[], int], offset: float) -> None:
        self._available = available
        self.offset = offset

    @property
    def remaining(self) -> float:
        """Tokens left. Fractional: futures are counted by a ratio."""
        return self._available() - self.offset


class Ledger:
    """Decides who joins a prefill batch, and with how many tokens.

    Args:
        page_size: tokens a page; what joins is charged in whole pages.
        pool_tokens: tokens that the whole pool holds.
        available: free and evictable tokens, as if nobody had joined this batch yet.
        running: those whose future output is reserved.
        ratio: the part of their output still allowed that is expected to come.
        input_tokens: budget of the batch. chunk_tokens: budget of the step; ``None``: prompts are never cut.
        riders: decodes that ride along; each takes a token of every budget first.
        max_requests: most requests that join.
        simulate: look ahead request by request where a candidate ignores end-of-sequence (sensible without a prefix
            cache only, where nothing in the pool can be evicted).
        resources: other memories.
    """

    def __init__(
        self,
        *,
        page_size: int,
        pool_tokens: int,
        available: Callable[[], int],
        running: Sequence[Request],
        ratio: float,
        input_tokens: int,
        chunk_tokens: int | None = None,
        riders: int = 0,
        max_requests: int | None = None,
        simulate: bool = False,
        resources: Sequence[Resource] = (),
    ) -> None:
        self._available = available
        self._page = page_size
        self._pool_tokens = pool_tokens
        self._ratio = ratio
        self._max_requests = max_requests
        self._simulate = simulate
        self._resources = resources
        self._running = list(running)
        self.joined: list[Request] = []
        self.total = Account(available, riders + sum(self._futures(running)))
        self.current = Account(available, riders)
        self.input_left = input_tokens - riders
        self.chunk_left = None if chunk_tokens is None else chunk_tokens - riders

    # ---- to ask

    def closed(self) -> Why | None:
        """Why nobody may join any more; ``None`` while the batch is open."""
        if self._available() <= max(self.total.offset, self.current.offset):
            return Why.RESERVE
        if self._resources and any(resource.remaining() <= 0 for resource in self._resources):
            return Why.RESERVE
        if self.input_left <= 0 or (self.chunk_left is not None and self.chunk_left <= 0):
            return Why.PREFILL_BUDGET
        return None

    def checking(self, request: Request) -> Callable[[Room], int | Why]:
        """The check of one candidate, as ``step.start`` wants it."""
        return partial(self.decide, request)

    def decide(self, request: Request, room: Room) -> int | Why:
        """Tokens to grant a candidate, or why none. Does not mutate.

        Pinning takes the cached prefix out of what can be evicted, so memory is asked on both sides of the pin.
        """
        if self._max_requests is not None and len(self.joined) >= self._max_requests:
            return Why.PREFILL_BUDGET
        if self._simulate and request.params.ignore_eos:
            return self._decide_by_simulation(request, room)
        owed, page = room.owed, self._page
        future = self._ceiling(request) - request.num_output
        if future > CLIP_NEW_TOKENS:
            future = CLIP_NEW_TOKENS
        spare = self._available() - self.total.offset - owed - page - (future if future > 0 else 0)
        if spare <= 0:
            return Why.RESERVE
        if self.chunk_left is None and self.joined and self._ceil(owed) >= self.input_left:
            return Why.PREFILL_BUDGET
        if spare <= room.idle * page:
            return Why.RESERVE
        if self._resources and any(resource.need(request, owed) > resource.remaining() for resource in self._resources):
            return Why.RESERVE
        return owed if self.chunk_left is None else self._cut(owed, page)

    def chunk(self, owed: int) -> int:
        """Tokens for the prompt in progress, which goes on even where the books say that there is no room left."""
        assert self.chunk_left is not None
        left = min(self.chunk_left, int(self.total.remaining))
        return min(owed, left if left > 0 else self.chunk_left)

    def victims(self, request: Request, owed: int, threshold: int) -> list[Request]:
        """Whom to preempt for a more urgent candidate, in batch order; nobody where it would not do.

        Least urgent first, among equals the latest to enter the queue; the candidate must be more urgent than each by
        more than ``threshold``. One at least is chosen, and then as many as free the tokens that the candidate lacks
        (``owed`` and its output), by what their futures are reserved at. All or nothing. Does not mutate.
        """
        lacking = owed + min(self._ceiling(request), CLIP_NEW_TOKENS) - self.total.remaining
        chosen: list[Request] = []
        for other in sorted(self._running, key=lambda r: (r.priority, r.entry_index), reverse=True):
            if other.priority - request.priority <= threshold:
                break
            chosen.append(other)
            lacking -= self._expected(other)
            if lacking <= 0:
                return [other for other in self._running if other in chosen]
        return []

    # ---- to book

    def charge(self, request: Request, tokens: int, *, whole: bool) -> None:
        """A request joined, or its prompt went on. ``whole``: up to its end, so that its output is reserved too."""
        self.joined.append(request)
        paged = self._ceil(tokens)
        output = min(self._ceiling(request), CLIP_NEW_TOKENS) if whole else 0
        self.total.offset += paged + output + self._page
        self.current.offset += paged + self._page
        self.input_left -= paged
        if self.chunk_left is not None:
            self.chunk_left -= paged
        for resource in self._resources:
            resource.charge(request, tokens)

    def forgive(self, victim: Request) -> None:
        """A running request was preempted: its future is reserved no more."""
        self._running.remove(victim)
        self.total.offset -= self._expected(victim)

    # ---- inside

    def _expected(self, request: Request) -> float:
        return self._futures((request,))[0]

    def _futures(self, requests: Iterable[Request]) -> list[float]:
        """Output tokens that each of them is expected to have yet. Of all that run, for each batch: written flat."""
        page, ratio, most = self._page, self._ratio, self._pool_tokens - self._page - 1
        found = []
        for request in requests:
            prompt = request.num_prompt
            ceiling, fits = request.max_total - prompt, most + -prompt // page * page
            if ceiling > fits:
                ceiling = fits if fits > 0 else 0
            future = ceiling - len(request.tokens) + prompt
            found.append((future if future < CLIP_NEW_TOKENS else CLIP_NEW_TOKENS) * ratio)
        return found

    def _ceiling(self, request: Request) -> int:
        """Output tokens that the request may have in all: what it asks for, or what an empty pool would hold."""
        page, prompt = self._page, request.num_prompt
        fits = self._pool_tokens + -prompt // page * page - page - 1
        return min(request.max_total - prompt, max(fits, 0))

    def _cut(self, owed: int, align: int) -> int | Why:
        if self.chunk_left is None or self._ceil(owed) <= self.chunk_left:
            return owed
        cut = self.chunk_left // align * align
        return cut if cut > 0 else Why.PREFILL_BUDGET

    def _ceil(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page

    def _decide_by_simulation(self, request: Request, room: Room) -> int | Why:
        """Let all that run, have joined, and the candidate generate in step; whoever ends gives its tokens back."""
        owed = self._ceil(room.owed)
        if owed > min(self.current.remaining, self.total.remaining):
            return Why.RESERVE
        futures = []
        for other in (request, *self._running, *self.joined):
            ratio = 1.0 if other.params.ignore_eos else self._ratio
            left = self._ceiling(other) * ratio - other.num_output
            if left > 0:
                futures.append((left, other.num_tokens))
        free = self.current.remaining - owed
        futures.sort()
        for ended, (left, occupied) in enumerate(futures):
            alive = len(futures) - ended
            if free - left * alive <= NO_EOS_RESERVE * alive:
                return Why.RESERVE
            free += occupied
        return self._cut(room.owed, 1)
