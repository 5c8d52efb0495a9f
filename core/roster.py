"""The roster: every live request, and the one place where each of them stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from engine.core.errors import InvalidRequest, QueueFull
from engine.core.identity import namespace_digest
from engine.core.pooling import Pooling
from engine.core.protocols import Limits, ModelInfo
from engine.core.queue import WaitingQueue
from engine.core.request import Request, SamplingParams, State
from engine.core.validate import can_read_cache, check_fields, validate


class Roster:
    """Live requests by id, and in one of three places: running (in order of admission), waiting, parked.

    Attribute ``model``: under whose fingerprint new requests are keyed.
    """

    def __init__(self, limits: Limits, model: ModelInfo, clock: Callable[[], float]) -> None:
        self.running: list[Request] = []
        self.waiting = WaitingQueue()
        self.parked: dict[str, Request] = {}
        self.live: dict[str, Request] = {}
        self._limits = limits
        self.model = model
        self.now = clock
        self.waiting_tokens = 0  # prompt tokens of requests that have not begun
        self._arrivals = 0
        self._entries = 0

    def create(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None,
        priority: int,
        salt: str,
        adapter: str,
        arrival: float | None,
        read_cache: bool,
        write_cache: bool,
        cache_ttl: float | None,
        deadline: float | None,
        metadata: Mapping[str, Any] | None,
        parked_on: Iterable[str],
        pooling: Pooling | None = None,
    ) -> Request:
        """Validate and place a new request. Mutates. Raises ``InvalidRequest`` or ``QueueFull``."""
        max_total, packed = validate(tokens, params, self._limits, pooling)
        check_fields(
            request_id=request_id, priority=priority, salt=salt, adapter=adapter, metadata=metadata,
            read_cache=read_cache, write_cache=write_cache, cache_ttl=cache_ttl, deadline=deadline,
        )  # fmt: skip
        if params.n != 1:
            raise InvalidRequest("n", "a request of the core is one sequence: add each of SamplingParams.choices()")
        if request_id is not None and request_id in self.live:
            raise InvalidRequest("request_id", f"{request_id!r} is in use by a live request")
        if self.full:
            raise QueueFull(f"{self._limits.max_waiting} requests are waiting, the most that may")
        if not self.has_room(len(tokens)):
            raise QueueFull(
                f"requests with {self.waiting_tokens} prompt tokens are waiting, at most "
                f"{self._limits.max_waiting_tokens} tokens may: there is no room for {len(tokens)} more"
            )
        self._arrivals += 1
        longest = self._limits.pool_tokens + 1  # the last token's KV is never needed
        began = self.now() if arrival is None else arrival
        request = Request(
            id=self._unused_id() if request_id is None else request_id,
            tokens=list(tokens),
            num_prompt=len(tokens),
            params=params,
            max_total=min(max_total, longest),
            capped=max_total > longest,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.model.eos_ids),
            namespace=namespace_digest(self.model.fingerprint, adapter, salt),
            adapter=adapter,
            salt=salt,
            priority=priority,
            arrival=began,
            arrival_index=self._arrivals,
            read_cache=read_cache and can_read_cache(params, pooling),
            write_cache=write_cache,
            cache_ttl=cache_ttl,
            deadline=None if deadline is None else began + deadline,
            packed=packed,
            metadata=MappingProxyType(dict(metadata or {})),  # shown to policies: to read
            parked_on=set(parked_on),
            pooling=pooling,
        )
        self.live[request.id] = request
        self.waiting_tokens += request.num_prompt
        if request.parked_on:
            request.state = State.PARKED
            self.parked[request.id] = request
        else:
            self._enter(request)
        return request

    @property
    def full(self) -> bool:
        """Whether as many requests wait as may."""
        return len(self.waiting) + len(self.parked) >= self._limits.max_waiting

    def has_room(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens may wait. One alone may have any length."""
        return not self.waiting_tokens or self.waiting_tokens + tokens <= self._limits.max_waiting_tokens

    def ready(self, request_id: str, what: str, *, front: bool = False) -> None:
        """``what`` a parked request waited for is there; when nothing is missing it joins the queue. Idempotent."""
        request = self.parked.get(request_id)
        if request is None:
            return
        request.parked_on.discard(what)
        if not request.parked_on:
            del self.parked[request_id]
            request.state = State.WAITING
            self._enter(request, front=front)

    def start(self, request: Request) -> None:
        """From the queue to those that run. Mutates."""
        self.waiting.discard(request)
        if request.started is None:
            self.waiting_tokens -= request.num_prompt
        request.state = State.RUNNING
        self.running.append(request)

    def requeue(self, request: Request, *, front: bool) -> None:
        """From those that run back to the queue. Mutates."""
        self.running.remove(request)
        request.state = State.WAITING
        self._enter(request, front=front)

    def withdraw(self, request: Request) -> None:
        """Take a request from wherever it stands; it stays live until ``forget``. Mutates."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.PARKED:
            del self.parked[request.id]
        else:
            self.waiting.discard(request)

    def sweep(self, ended: Sequence[Request]) -> None:
        """Take those that a commit ended from where they stand. Mutates."""
        running = len(self.running)
        self.running = [request for request in self.running if request.state is State.RUNNING]
        if running - len(self.running) < len(ended):  # one ended by a late result, while it waited
            self.waiting.remove(set(ended))

    def forget(self, request: Request) -> None:
        """The request is no longer live. Mutates."""
        del self.live[request.id]
        if request.started is None:
            self.waiting_tokens -= request.num_prompt

    def _enter(self, request: Request, *, front: bool = False) -> None:
        self._entries += 1
        request.entry_index = self._entries
        self.waiting.push(request, front=front)

    def _unused_id(self) -> str:
        number = self._arrivals
        while f"r{number}" in self.live:
            number += 1
        return f"r{number}"
