"""``AsyncEngine``: an engine core, in a process or a thread of its own, behind one asynchronous face."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, EngineDead, EngineError, InvalidRequest
from engine.core.histograms import Histogram
from engine.core.outputs import Chunk, Completion, Embedding
from engine.core.pooling import Pooling
from engine.core.protocols import Limits, ModelInfo
from engine.core.request import Finish, SamplingParams
from engine.core.serve.asks import Ask, Size, check_room, logprobs_of, prompt_logprobs_of, size_of
from engine.core.serve.cache import CacheClient
from engine.core.serve.ledger import Ledger
from engine.core.serve.link import Link
from engine.core.serve.messages import (
    Abort,
    Add,
    AskStats,
    DeskAnswer,
    Event,
    Outputs,
    Refused,
    Stats,
    Submit,
    Updated,
    UpdateWeights,
)
from engine.core.serve.questions import Questions, error_of
from engine.core.serve.record import RecordClient
from engine.core.serve.streams import Gather, Group, Stream, embedded
from engine.core.serve.text import encode, find_tokenizer, text_of
from engine.core.serve.transport import Packed
from engine.core.serve.watchdog import Watchdog
from engine.core.weights import NewWeights, WhileOpen

if TYPE_CHECKING:
    from engine.core.models.tokenizer import Tokenizer

LONG_TEXT = 4096  # characters; longer text is tokenised in a thread, so that the event loop stays quick

Made = tuple[Group, Packed]
"""Streams of requests, and the message that submits them."""


@dataclass(frozen=True, slots=True)
class Health:
    """``ok`` is False once the engine is gone, with the ``cause``; it does not come back.

    ``stall`` is for how many seconds no work has come forward (0 while there is none), ``silence`` for how many
    nothing was heard of the engine.
    """

    ok: bool
    cause: str | None
    open_requests: int
    stall: float = 0.0
    silence: float = 0.0


@dataclass(frozen=True, slots=True)
class Measures:
    """What a core has measured: its counters and gauges, histograms by name, how many requests wait for what."""

    values: Mapping[str, int | float]
    histograms: Mapping[str, Histogram]
    waits: Mapping[str, int]


class AsyncEngine:
    """An engine core and the requests that are open on it.

    Start it with ``await AsyncEngine.start(config)`` (or ``launch`` from synchronous code), end it with ``close``.
    Every request gets an internal id of its own. When the core dies, every open request raises ``EngineDead`` and new
    ones are refused with it: nothing hangs. Methods belong to one event loop, that of the first request.

    Attributes:
        config: what it was started with.
        limits: what every request must obey.
        model: what is served.
        tokenizer: of the served model; ``None`` where the simulated model has none.
        description: what was chosen (plugins, pages, limits).
        cache: numbers of the cache, why something is not found, its events; and a flush.
        record: its decisions: recorded, written, explained.
        ledger: what is open, and counts of what was accepted and how it ended.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.limits: Limits
        self.model: ModelInfo
        self.tokenizer: Tokenizer | None = None
        self.description: dict[str, Any] = {}
        self.ledger = Ledger()
        self.cache = CacheClient(self)
        self.record = RecordClient(self)
        self._link: Link
        self._at_exit: weakref.finalize[[], AsyncEngine]
        self._numbers = itertools.count(1)
        self._prefix = secrets.token_hex(4)
        self._questions = Questions(self._open, lambda command: self._link.send(command))

    # ---- life

    @classmethod
    async def start(
        cls,
        config: EngineConfig | None = None,
        *,
        in_process: bool = False,
        heartbeat_timeout: float | None = None,
        step_timeout: float | None = None,
    ) -> AsyncEngine:
        """``launch`` without blocking the event loop."""
        return await asyncio.to_thread(
            cls.launch, config, in_process=in_process, heartbeat_timeout=heartbeat_timeout, step_timeout=step_timeout
        )

    @classmethod
    def launch(
        cls,
        config: EngineConfig | None = None,
        *,
        in_process: bool = False,
        heartbeat_timeout: float | None = None,
        step_timeout: float | None = None,
    ) -> AsyncEngine:
        """Start the core and wait until its model is loaded.

        Args:
            in_process: a thread of this process instead of a child process (simpler to debug, shares the interpreter).
            heartbeat_timeout, step_timeout: instead of the configuration's.

        Raises:
            ConfigError, PluginError, ModelError: as the core raised them.
            EngineDead: the core ended while it was loading.
        """
        engine = cls(config or EngineConfig.model_validate({}))
        if in_process:  # a thread that loads a model cannot be stopped: find the tokenizer, or fail, before it starts
            engine.tokenizer = find_tokenizer(engine.config)
        fields = engine.config
        watchdog = Watchdog(heartbeat_timeout or fields.heartbeat_timeout, step_timeout or fields.step_timeout)
        engine._link = Link(
            engine.config, watchdog, in_process=in_process, on_event=engine._on_event, on_death=engine._fail_all
        )
        # The transport's threads keep an engine alive that nobody closed: it is closed at the interpreter's end.
        engine._at_exit = weakref.finalize(engine, engine._link.close)
        try:
            if not in_process:  # while the child loads
                engine.tokenizer = find_tokenizer(engine.config)
            ready = engine._link.wait()
        except BaseException:
            engine.shutdown()
            raise
        engine.limits, engine.model, engine.description = ready.limits, ready.model, ready.description
        return engine

    def shutdown(self) -> None:
        """Stop the core and free everything; requests that are still open raise ``EngineDead``. Idempotent.

        In a fork of the process that started it, it does nothing.
        """
        self._link.close()
        self._at_exit.detach()

    async def close(self) -> None:
        """``shutdown`` without blocking the event loop."""
        await asyncio.to_thread(self.shutdown)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def health(self) -> Health:
        """Whether the core lives and gets on. Never waits."""
        cause, watchdog = self._link.cause, self._link.watchdog
        return Health(cause is None, cause, len(self.ledger), watchdog.stall, watchdog.silence)

    @property
    def pid(self) -> int | None:
        """Process id of the core; ``None`` where it runs in a thread of this process."""
        return self._link.pid

    # ---- requests

    async def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; long text is tokenised in a thread. Raises ``InvalidRequest``."""
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(encode, self.tokenizer, text, self.limits)
        return encode(self.tokenizer, text, self.limits)

    def submit_many(self, asks: Sequence[Ask], *, checked: bool = False) -> Group:
        """Submit requests as one: all are accepted, or none is and the error says why. Choice k of the p-th request has
        the index ``p * n + k`` in the group, where all have the same ``n``.

        Args:
            checked: they went through ``Ask.check`` already (in a thread, for long prompts).

        Raises:
            InvalidRequest: one has a field of a wrong type or breaks a limit, or more than could ever be open.
            QueueFull: there is no room for all of them now.
            EngineDead: there is no engine any more.
        """
        for ask in () if checked else asks:
            ask.check(self.limits)
        size = size_of(asks, self.limits)
        self._check_room(size)
        return self._enter(*self._made(asks))

    async def submit_aside(self, asks: Sequence[Ask], run: Callable[[Callable[[], Made]], Awaitable[Made]]) -> Group:
        """``submit_many`` of requests that were checked, for those that are many: what is made of them is made by
        ``run``, elsewhere. Raises as it does."""
        size = size_of(asks, self.limits)
        self._check_room(size)
        group, packed = await run(lambda: self._made(asks))
        self._check_room(size)  # others may have come meanwhile
        return self._enter(group, packed)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        metadata: Mapping[str, Any] | None = None,
        read_cache: bool = True,
        write_cache: bool = True,
        cache_ttl: float | None = None,
        deadline: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """Stream one request of one choice. Closing or cancelling the iterator ends the request in the engine.

        A request that the engine could not go on with ends with finish reason ``error`` and its diagnosis in
        ``detail``.

        Raises:
            InvalidRequest, QueueFull, EngineDead: as ``submit_many``; ``EngineDead`` also in the middle.
        """
        tokens = await self.encode(prompt) if isinstance(prompt, str) else prompt
        ask = Ask(
            tokens=tokens, params=params or SamplingParams(), request_id=request_id, priority=priority, salt=salt,
            metadata=metadata, read_cache=read_cache, write_cache=write_cache, cache_ttl=cache_ttl, deadline=deadline,
        )  # fmt: skip
        if isinstance(ask.params, SamplingParams) and ask.params.n != 1:
            raise InvalidRequest("n", "a stream is one choice: use submit_many for several")
        group = self.submit_many([ask])
        try:
            async for _, chunk in group:
                yield chunk
        finally:
            group.abort()

    async def complete(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """``generate`` to its end, as one completion."""
        gather = Gather()
        async for chunk in self.generate(prompt, params, **options):
            completion = gather.add(chunk)
            if completion is not None:
                return completion
        raise EngineError("the stream ended without a finish reason")

    async def embed(self, prompt: str | Sequence[int], pooling: Pooling | None = None, **options: Any) -> Embedding:
        """A prompt as a vector. ``options`` are those of ``generate``. Raises as it does, and ``EngineError`` where the
        request ended without one; cancelling ends the request in the engine."""
        tokens = await self.encode(prompt) if isinstance(prompt, str) else prompt
        group = self.submit_many([Ask(tokens=tokens, pooling=pooling or Pooling(), **options)])
        try:
            async for _, chunk in group:
                if chunk.finish_reason is not None:
                    return embedded(group.streams[0], chunk)
        finally:
            group.abort()
        raise EngineError("the stream ended without a finish reason")

    def abort(self, request_id: str) -> int:
        """End every open request that was submitted under this id, with finish ``abort``. Returns how many."""
        found = self.ledger.under(request_id)
        self._leave(found)
        return len(found)

    def end_all(self, error: Exception) -> int:
        """End every open request; its caller gets what it has and then ``error``. Returns how many there were."""
        streams = list(self.ledger.open.values())
        if streams:
            self.ledger.fail(streams, error, Finish.ABORT)
            self._link.send(Abort([stream.request_id for stream in streams]))
        return len(streams)

    async def stats(self) -> dict[str, int | float]:
        """The core's counters and gauges now. Raises ``EngineDead``, or ``EngineError`` where a step takes too long."""
        return dict((await self.measures()).values)

    async def measures(self) -> Measures:
        """``stats``, and what the core has measured since it started. Raises as ``stats``."""
        said: Stats = await self._questions.soon(AskStats)
        return Measures(said.values, said.histograms, said.waits)

    async def ask_cache(self, what: str, **options: Any) -> dict[str, Any]:
        """``CacheDesk.ask``, between two steps. Raises as it does, and as ``stats``."""
        return await self._questions.desk("cache", what, options)

    async def ask_record(self, what: str, **options: Any) -> dict[str, Any]:
        """``RecordDesk.ask``, between two steps. Raises as it does, and as ``stats``."""
        return await self._questions.desk("record", what, options)

    async def ask_lens(self, what: str, **options: Any) -> dict[str, Any]:
        """``Lens.ask``, between two steps. Raises as it does, and as ``stats``."""
        return await self._questions.desk("lens", what, options)

    async def update_weights(
        self, weights: NewWeights, *, running: WhileOpen = "refuse", version: str | None = None
    ) -> ModelInfo:
        """Replace weights in place between two steps: see ``LLM.update_weights``, whose arguments and errors these are.

        With ``running="finish"`` requests that come meanwhile wait for the new weights. To a core in a process of its
        own travel only plain values: the name or path of a model to read the weights from.

        Raises:
            EngineDead: there is no engine any more.
        """
        source = str(weights) if isinstance(weights, PathLike) else weights
        try:
            answer: Updated = await self._questions.ask(UpdateWeights, source, running, version)
        except InvalidRequest as error:
            raise ConfigError(
                "these weights cannot travel to the engine's process: give the path of a model, or start the engine "
                f"with in_process=True ({error.message})"
            ) from error
        if answer.model is None:
            raise error_of(answer)
        self.model = answer.model
        return answer.model

    # ---- inside

    def _check_room(self, size: Size) -> None:
        self._open()
        check_room(size, self.limits, self.ledger)

    def _made(self, asks: Sequence[Ask]) -> Made:
        """Streams of these, and what is to be sent. Touches nothing shared: any thread may do it."""
        group = Group(self._leave)
        each = ((ask, params) for ask in asks for params in ask.params.choices())
        adds = [self._prepare(group, index, ask, params) for index, (ask, params) in enumerate(each)]
        return group, self._link.pack(Submit(adds))

    def _enter(self, group: Group, packed: Packed) -> Group:
        self._link.put(packed)  # before the books: what cannot be sent was never accepted
        for stream in group.streams:
            self.ledger.enter(stream)
        return group

    def _prepare(self, group: Group, index: int, ask: Ask, params: SamplingParams) -> Add:
        request_id = f"{self._prefix}-{next(self._numbers)}"
        stream = Stream(
            request_id, len(ask.tokens), params, text_of(self.tokenizer, params) if ask.pooling is None else None,
            external_id=ask.request_id, tenant=ask.tenant or "", note=ask.note, wake=group.waker(index),
        )  # fmt: skip
        stream.logprobs_room = logprobs_of(params, len(ask.tokens), self.limits)
        stream.logprobs_room += prompt_logprobs_of(params, len(ask.tokens))
        group.add(stream)
        metadata = dict(ask.metadata) if ask.metadata is not None else None
        if metadata is not None and ask.tenant is not None:
            metadata.pop("tenant", None)
        if ask.tenant:
            metadata = {**(metadata or {}), "tenant": ask.tenant}
        return Add(
            request_id, list(ask.tokens), params, ask.priority, ask.salt, metadata,
            ask.read_cache, ask.write_cache, ask.deadline, ask.pooling, ask.cache_ttl,
        )  # fmt: skip

    def _leave(self, streams: Sequence[Stream]) -> None:
        """Nobody wants these any more. Sends and returns: safe in a handler that is being cancelled."""
        if gone := self.ledger.leave(streams):
            self._link.send(Abort(gone))

    def _open(self) -> None:
        """Somebody is about to be told something, in this loop. Raises ``EngineDead``."""
        self._bind()  # before the check: from here on, a death is told to this loop
        self._link.check()

    def _bind(self) -> None:
        if self._link.bind(busy=len(self.ledger) > 0):
            self._leave(list(self.ledger.open.values()))  # left behind by a loop that was closed

    def _on_event(self, event: Event) -> None:
        match event:
            case Outputs(deltas=deltas, started=started):
                self.ledger.started(started)
                for abort in self.ledger.deliver(deltas):
                    self._link.send(abort)
            case Stats() | DeskAnswer() | Updated():
                self._questions.answered(event)
            case Refused(request_id=request_id):
                if (stream := self.ledger.open.get(request_id)) is not None:
                    self.ledger.fail([stream], InvalidRequest(event.field, event.message, code=event.code))

    def _fail_all(self) -> None:
        words = self._link.cause or "the engine is gone"
        for stream in list(self.ledger.open.values()):
            self.ledger.fail([stream], EngineDead(words))  # each its own: a traceback grows where it is raised
        self._questions.fail(words)
