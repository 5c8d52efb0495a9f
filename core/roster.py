"""The roster: every live request, and the one place where each of them stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from engine.core.errors import InvalidRequest, QueueFull
from engine.core.identity import namespace_digest
from engine.core.protocols import Limits, ModelInfo
from engine.core.queue import WaitingQueue
from engine.core.request import Request, SamplingParams, State
from engine.core.validate import check_fields, validate


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
        metadata: Mapping[str, Any] | None,
        parked_on: Iterable[str],
    ) -> Request:
        """Validate and place a new request. Mutates. Raises ``InvalidRequest`` or ``QueueFull``."""
        max_total, packed = validate(tokens, params, self._limits)
        check_fields(request_id=request_id, priority=priority, salt=salt, adapter=adapter, metadata=metadata)
        if request_id is not None and request_id in self.live:
            raise InvalidRequest("request_id", f"{request_id!r} is in use by a live request")
        if len(self.waiting) + len(self.parked) >= self._limits.max_waiting:
            raise QueueFull(f"{self._limits.max_waiting} requests are waiting, the most that may")
        self._arrivals += 1
        longest = self._limits.pool_tokens + 1  # the last token's KV is never needed
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
            arrival=self.now() if arrival is None else arrival,
            arrival_index=self._arrivals,
            read_cache=read_cache,
            packed=packed,
            metadata=MappingProxyType(dict(metadata or {})),  # shown to policies: to read
            parked_on=set(parked_on),
        )
        self.live[request.id] = request
        if request.parked_on:
            request.state = State.PARKED
            self.parked[request.id] = request
        else:
            self._enter(request)
        return request

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

    def _enter(self, request: Request, *, front: bool = False) -> None:
        self._entries += 1
        request.entry_index = self._entries
        self.waiting.push(request, front=front)

    def _unused_id(self) -> str:
        number = self._arrivals
        while f"r{number}" in self.live:
            number += 1
        return f"r{number}"
