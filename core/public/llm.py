"""``LLM``: a whole engine in this process, without threads. Nothing happens unless you call it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from engine.core.assemble import assemble
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, EngineError, InvalidRequest, suggest
from engine.core.outputs import Chunk, Completion
from engine.core.request import Finish, SamplingParams
from engine.core.serve.host import Intake
from engine.core.serve.messages import Add
from engine.core.serve.streams import Gather, Stream
from engine.core.serve.text import encode, find_tokenizer, text_of
from engine.core.validate import validate

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """An engine to use from a script. Single-threaded and deterministic.

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
        self.config = configure(model, config, overrides)
        self.core = assemble(self.config)
        self.tokenizer = find_tokenizer(self.config)
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
        """Complete prompts (text or token ids), all in one batch. The answers are in the order of the prompts.

        A prompt that the engine could not go on with has finish reason ``error`` and a diagnosis in ``detail``.

        Args:
            params: one for all, or one a prompt.
            progress: show a progress bar on standard error.

        Raises:
            InvalidRequest: names the prompt and the limit; nothing was computed.
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

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> ChunkStream:
        """Complete one prompt piece by piece. Several may be open at once. Closing or dropping the iterator ends the
        request, also before its first piece.

        Raises:
            InvalidRequest: at once, before the first piece is asked for.
        """
        [stream] = self._open([self._encode(prompt)], [params or SamplingParams()])
        return ChunkStream(stream, self.step, self._abort)

    # ---- life

    def step(self) -> None:
        """One step of the engine, for all open requests."""
        self._stepping = True
        try:
            self._advance()
        finally:
            self._stepping = False
            dropped, self._dropped = self._dropped, []
            self._abort(dropped)

    def _advance(self) -> None:
        for item, error in self._intake.pump():
            self._streams.pop(item.request_id).fail(error)
        if not self.core.has_work:
            raise EngineError(f"{len(self._streams)} requests are open, but the engine has no work")
        for delta in self.core.step():
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            stop = stream.feed(delta)
            if stop is not None and delta.finish is None:
                self.core.abort(delta.request_id, Finish.STOP, stop)
            if stream.done:
                del self._streams[delta.request_id]

    def close(self) -> None:
        """Free everything: model, KV pages, plugins. Idempotent. Open streams end with ``abort``."""
        self._abort(list(self._streams.values()))
        self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return encode(self.tokenizer, prompt, self.core.limits) if isinstance(prompt, str) else prompt

    def _open(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Stream]:
        for number, (tokens, wish) in enumerate(zip(prompts, params, strict=True)):
            try:
                validate(tokens, wish, self.core.limits)
            except InvalidRequest as error:
                if len(prompts) == 1:
                    raise
                raise InvalidRequest(f"prompts[{number}]", str(error)) from error
        streams: list[Stream] = []
        for tokens, wish in zip(prompts, params, strict=True):
            request_id = f"llm-{next(self._numbers)}"
            stream = Stream(request_id, len(tokens), wish, text_of(self.tokenizer, wish))
            self._streams[request_id] = stream
            self._intake.put([Add(request_id, list(tokens), wish)])
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

    def _abort(self, streams: Sequence[Stream]) -> None:
        if self._stepping:  # a stream was collected as garbage: the core is not to be touched now
            self._dropped.extend(streams)
            return
        for stream in streams:
            if self._streams.pop(stream.request_id, None) is None:
                continue
            if not self._intake.cancel(stream.request_id):
                self.core.abort(stream.request_id)
            stream.end(Finish.ABORT)


class ChunkStream(Iterator[Chunk]):
    """The pieces of one completion, as they are asked for. A context manager; ``close`` ends the request."""

    def __init__(self, stream: Stream, step: Callable[[], None], abort: Callable[[Sequence[Stream]], None]) -> None:
        self._stream, self._step, self._abort = stream, step, abort
        self._closed = False

    def __next__(self) -> Chunk:
        try:
            while not (self._closed or self._stream.exhausted):
                chunk = self._stream.take()
                if chunk is not None:
                    return chunk
                if not self._stream.done:
                    self._step()
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """End the request; no more pieces come. Idempotent."""
        self._closed = True
        self._abort([self._stream])

    def __enter__(self) -> ChunkStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Bar:
    """A progress bar over finished prompts."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True))
        self._task = self._progress.add_task("prompts", total=total)
        self._progress.start()

    def advance(self, completion: Completion) -> None:
        """One more prompt is done."""
        self._progress.advance(self._task)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()


def configure(model: str | None, config: EngineConfig | None, overrides: Mapping[str, Any]) -> EngineConfig:
    """The effective configuration. Raises ``ConfigError`` naming the field at fault."""
    wishes = {**overrides, **({"model": model} if model is not None else {})}
    for name in wishes:
        if name not in EngineConfig.model_fields:
            raise ConfigError(f"unknown field {name!r}: {suggest(name, EngineConfig.model_fields)}")
    base = {name: getattr(config, name) for name in config.model_fields_set} if config is not None else {}
    try:
        return EngineConfig.model_validate({**base, **wishes})
    except ValueError as error:
        raise ConfigError(str(error)) from error


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many. A list of integers is one prompt; an empty list is no prompt at all.

    Raises:
        InvalidRequest: it is something else, such as an array.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest("prompts", f"must be text or a list, not {type(prompts).__name__}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One ``SamplingParams`` for each prompt. Raises ``InvalidRequest`` where the numbers differ."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest("params", f"{len(params)} sampling params for {count} prompts")
    return list(params)
