"""``LLM``: a whole engine in this process, without threads. Nothing happens unless you call it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from engine._chunks import Bar, ChunkStream
from engine._inputs import Prompt, as_batch, configure, spread
from engine.core.assemble import assemble
from engine.core.config import EngineConfig
from engine.core.errors import EngineDead, EngineError, InvalidRequest
from engine.core.outputs import Completion, Embedding
from engine.core.pooling import Pooling
from engine.core.protocols import ModelInfo
from engine.core.request import Finish, SamplingParams
from engine.core.serve.home import Home
from engine.core.serve.host import Intake
from engine.core.serve.messages import Add
from engine.core.serve.streams import Gather, Stream, embedded
from engine.core.serve.text import encode, find_tokenizer, text_of
from engine.core.validate import validate
from engine.core.weights import NewWeights, WhileOpen

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """An engine to use from a script. Single-threaded and deterministic; it belongs to the process that made it.

    Args:
        model: model name, HF directory, GGUF file or hub id (default: the small model that ships with the engine).
        config: a complete configuration; ``overrides`` replace single fields of it.
        overrides: fields of ``EngineConfig``, e.g. ``scheduler="radix"`` or
            ``scheduler={"name": "radix", "chunked_prefill_size": 512}``.

    Attributes:
        core: the engine core, to step by hand: ``core.add(...)``, ``core.step()``, ``core.check()``.
        tokenizer: of the model; ``None`` where the simulated model has none.
        config: the effective configuration.

    Raises:
        ConfigError, PluginError, ModelError: nothing was started.

    Example::

        with LLM() as llm:
            print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)
    """

    def __init__(self, model: str | None = None, *, config: EngineConfig | None = None, **overrides: Any) -> None:
        self._home, self._closed = Home(), False
        self.config = configure(model, config, overrides)
        self.core = assemble(self.config)
        try:
            self.tokenizer = find_tokenizer(self.config)
        except BaseException:
            self.core.close()
            raise
        self._intake = Intake(self.core)
        self._streams: dict[str, Stream] = {}
        self._numbers = itertools.count(1)
        self._stepping = False
        self._dropped: list[Stream] = []

    # ---- text in, text out

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts (text or token ids), all in one batch. The answers are in the order of the prompts; where
        ``params.n`` is more than 1, each prompt has so many of them, one after the other.

        A prompt that the engine could not go on with has finish reason ``error`` and a diagnosis in ``detail``.

        Args:
            params: one for all, or one a prompt.
            progress: show a progress bar on standard error.

        Raises:
            InvalidRequest: names the prompt and the limit; nothing was computed.
            EngineDead: the engine was closed, or this is a fork of its process.
        """
        batch = as_batch(prompts)
        streams = self._open([self._encode(prompt) for prompt in batch], spread(params, len(batch)))
        return self._complete(streams, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Answer conversations (``{"role": …, "content": …}``), one or several, with the model's own template."""
        batch: Any = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        return self.generate([self.render_chat(conversation) for conversation in batch], params, progress=progress)

    def render_chat(self, messages: Messages) -> str:
        """A conversation as the text that the model is given. Raises ``InvalidRequest`` without a template."""
        if self.tokenizer is None:
            raise InvalidRequest("messages", f"model {self.core.model.name!r} has no tokenizer")
        return self.tokenizer.render_chat([dict(message) for message in messages])

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: Pooling | None = None, *, progress: bool = False
    ) -> list[Embedding]:
        """Prompts (text or token ids) as vectors, all in one batch, in the order of the prompts.

        Args:
            pooling: how (default: the last token's hidden state, normalised).
            progress: show a progress bar on standard error.

        Raises:
            InvalidRequest: names the prompt and the limit, or the executor cannot; nothing was computed.
            EngineError: the engine could not go on with one.
            EngineDead: the engine was closed, or this is a fork of its process.
        """
        batch = as_batch(prompts)
        none = SamplingParams()
        streams = self._open([self._encode(prompt) for prompt in batch], [none] * len(batch), pooling or Pooling())
        return [embedded(stream, end) for stream, end in zip(streams, self._complete(streams, progress), strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> ChunkStream:
        """Complete one prompt piece by piece. Several may be open at once. Closing or dropping the iterator ends the
        request, also before its first piece.

        Raises:
            InvalidRequest: at once, before the first piece is asked for.
        """
        wish = params or SamplingParams()
        if wish.n != 1:
            raise InvalidRequest("n", "a stream is one choice: open several")
        [stream] = self._open([self._encode(prompt)], [wish])
        return ChunkStream(stream, self.step, self._abort)

    def explain_cache(self, prompt: Prompt, *, salt: str = "", adapter: str = "") -> dict[str, Any]:
        """How much of a prompt (text or token ids) is cached, and why no more: ``core.cache.explain``. Changes nothing.

        Numbers, a flush and events of the cache are at ``core.cache``.

        Raises:
            InvalidRequest: no prompt could be so.
        """
        self._check()
        return self.core.cache.explain(self._encode(prompt), salt=salt, adapter=adapter)

    # ---- life

    def step(self) -> bool:
        """One step of the engine, for all open requests. False once there is nothing left to do.

        Raises:
            EngineDead: the engine was closed, or this is a fork of its process.
        """
        self._check()
        if not (self._streams or self.core.has_work):
            return False
        self._stepping = True
        try:
            self._advance()
        finally:
            self._stepping = False
            dropped, self._dropped = self._dropped, []
            self._abort(dropped)
        return bool(self._streams or self.core.has_work)

    def _advance(self) -> None:
        for item, error in self._intake.pump():
            self._streams.pop(item.request_id).fail(error)
        if not self.core.has_work:
            raise EngineError(f"{len(self._streams)} requests are open, but the engine has no work")
        deltas = self.core.step()
        for request_id, refusal in self.core.take_refused():
            if (refused := self._streams.pop(request_id, None)) is not None:
                refused.fail(refusal)
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            stop = stream.feed(delta)
            if stop is not None and delta.finish is None:
                self.core.abort(delta.request_id, Finish.STOP, stop)
            if stream.done:
                del self._streams[delta.request_id]

    def close(self) -> None:
        """Free everything: model, KV pages, plugins, threads. Idempotent. Open streams end with ``abort``.

        Nothing can be asked of it afterwards (``EngineDead``). In a fork of its process it does nothing.
        """
        if self._home.here:
            self._abort(list(self._streams.values()), "the engine was closed")
            self._closed = True
            self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- other weights

    def weights(self) -> Mapping[str, Any]:
        """A copy of the weights in force, by name (``torch`` tensors, for the executor ``torch``)."""
        self._check()
        return self.core.executor.weights()

    def update_weights(
        self,
        weights: NewWeights,
        *,
        running: WhileOpen = "refuse",
        version: str | None = None,
    ) -> ModelInfo:
        """Replace weights in place, e.g. after a step of training. No prefix that the old ones computed is used again.

        Args:
            weights: tensors by name (a ``state_dict``; all or some of them), copied; or a model to read them from; or a
                function that is given the weights in force and returns those to replace.
            running: what becomes of open requests that have begun. ``refuse``: an error, and nothing is changed;
                ``finish``: everything open is brought to its end first, by the old weights; ``recompute``: they go on
                after the text they have, read anew by the new weights; ``abort``: they end with ``abort``.
            version: names the weights (``step-1200``): equal names must mean equal weights. Default: a digest of them.

        Returns:
            What is served now, with its new ``fingerprint``.

        Raises:
            EngineError: requests have begun, and ``running`` is ``refuse``.
            ModelError: the weights do not fit. ConfigError: the executor cannot change its own. Nothing was changed.
        """
        self._check()
        if running == "finish":
            while (self._streams or not self.core.settled) and self.step():
                pass
        return self.core.update_weights(weights, running="refuse" if running == "finish" else running, version=version)

    # ---- inside

    def _check(self) -> None:
        self._home.check()
        if self._closed:
            raise EngineDead("the engine was closed")

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return encode(self.tokenizer, prompt, self.core.limits) if isinstance(prompt, str) else prompt

    def _open(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], pooling: Pooling | None = None
    ) -> list[Stream]:
        self._check()
        for number, (tokens, wish) in enumerate(zip(prompts, params, strict=True)):
            try:
                validate(tokens, wish, self.core.limits, pooling)
            except InvalidRequest as error:
                if len(prompts) == 1:
                    raise
                raise InvalidRequest(f"prompts[{number}]", str(error)) from error
        streams: list[Stream] = []
        each = ((tokens, choice) for tokens, wish in zip(prompts, params, strict=True) for choice in wish.choices())
        for tokens, wish in each:
            request_id = f"llm-{next(self._numbers)}"
            text = text_of(self.tokenizer, wish) if pooling is None else None
            stream = self._streams[request_id] = Stream(request_id, len(tokens), wish, text)
            self._intake.put([Add(request_id, list(tokens), wish, pooling=pooling)])
            streams.append(stream)
        return streams

    def _complete(self, streams: Sequence[Stream], progress: bool) -> list[Completion]:
        found: dict[str, Completion] = {}
        gathers = {stream.request_id: Gather() for stream in streams}
        bar = Bar(len(streams)) if progress else None
        try:
            waiting = list(streams)
            while waiting:
                self.step()
                for stream in waiting:
                    chunk = stream.take()
                    completion = gathers[stream.request_id].add(chunk) if chunk is not None else None
                    if completion is not None:
                        found[stream.request_id] = completion
                        if bar is not None:
                            bar.advance(completion)
                waiting = [stream for stream in waiting if stream.request_id not in found]
        finally:
            self._abort(streams)
            if bar is not None:
                bar.close()
        return [found[stream.request_id] for stream in streams]

    def _abort(self, streams: Sequence[Stream], detail: str | None = None) -> None:
        if self._stepping:  # a stream was collected as garbage: the core is not to be touched now
            self._dropped.extend(streams)
            return
        for stream in streams:
            if self._streams.pop(stream.request_id, None) is None:
                continue
            if not self._intake.cancel(stream.request_id):
                self.core.abort(stream.request_id, detail=detail)
            stream.end(Finish.ABORT, detail)
