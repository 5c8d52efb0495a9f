"""A request as its caller sees it: text and tokens that arrived and were not yet taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.core.errors import EngineError
from engine.core.outputs import Chunk, Completion, Embedding
from engine.core.plan import Delta
from engine.core.request import Finish, SamplingParams
from engine.core.sampling import TokenLogprobs
from engine.core.serve.times import Course

if TYPE_CHECKING:
    from engine.core.serve.text import Text


class Stream:
    """Turns deltas into chunks. What is not taken in time is joined, so a slow reader costs no more than its text.

    Not thread-safe: fed and read by one thread.

    Attributes:
        vector: what a request that pools came to; empty before its end.
        logprobs_room: how many log-probabilities it may come to.
    """

    def __init__(
        self,
        request_id: str,
        num_prompt: int,
        params: SamplingParams,
        text: Text | None,
        *,
        external_id: str | None = None,
        tenant: str = "",
        note: str = "",
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.request_id = request_id
        self.external_id = external_id or request_id
        self.tenant, self.note = tenant, note
        self.course = Course()
        self.num_prompt = num_prompt
        self.num_output = 0
        self.logprobs_room = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.vector = b""
        self._detail: str | None = None
        self._params = params
        self._text = text
        self._wake = wake
        self._new_text = ""
        self._new_tokens: list[int] = []
        self._new_logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._last_taken = False

    @property
    def done(self) -> bool:
        """True once the request has ended (what it brought may still be waiting to be taken)."""
        return self.finish_reason is not None or self.error is not None

    @property
    def exhausted(self) -> bool:
        """True once the last chunk was taken."""
        return self._last_taken

    def feed(self, delta: Delta) -> str | None:
        """Take in what a step brought. Returns the stop string if one was met: the request has then ended here, and
        the engine must be told."""
        if self.done:
            return None
        self.cached_tokens = delta.cached_tokens
        if delta.tokens and not self.num_output and self._params.prompt_logprobs is not None:
            self._prompt_logprobs = tuple(delta.prompt_logprobs)
        logprobs = delta.logprobs
        for number, token in enumerate(delta.tokens, 1):
            self._new_tokens.append(token)
            self.num_output += 1
            if logprobs:
                self._new_logprobs.append(logprobs[number - 1])
            is_stop_token = delta.finish is Finish.STOP and number == len(delta.tokens) and delta.detail == str(token)
            if self._text is None or (is_stop_token and not self._params.include_stop_str_in_output):
                continue
            self._new_text += self._text.push(token)
            if self._text.stopped is not None:
                self.end(Finish.STOP, self._text.stopped)
                return self._text.stopped
        if delta.finish is not None:
            self.vector = delta.vector
            if self._text is not None:
                self._new_text += self._text.finish()
                if self._text.stopped is not None:  # in the very last text
                    self.end(Finish.STOP, self._text.stopped)
            self.end(delta.finish, delta.detail)
        else:
            self._wake()
        return None

    def end(self, finish: Finish, detail: str | None = None) -> None:
        """The request is over. Idempotent: the first reason stays."""
        if not self.done:
            self.finish_reason = finish.value
            self._detail = detail
        self._wake()

    def fail(self, error: Exception) -> None:
        """The request cannot be brought to its end; ``take`` raises ``error`` once the rest was taken. Idempotent."""
        if not self.done:
            self.error = error
        self._wake()

    def take(self) -> Chunk | None:
        """All news since the last call as one chunk, ``None`` when there is none. Raises what ``fail`` was given."""
        if self._last_taken:
            return None
        if not (self._new_tokens or self._new_text or self.done):
            return None
        if self.error is not None and not self._new_tokens:
            self._last_taken = True
            raise self.error
        text, self._new_text = self._new_text, ""
        tokens, self._new_tokens = tuple(self._new_tokens), []
        logprobs, self._new_logprobs = tuple(self._new_logprobs), []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        self._last_taken = self.finish_reason is not None
        return Chunk(
            text, tokens, self.finish_reason, self._detail, self.num_prompt, self.num_output, self.cached_tokens,
            logprobs, prompt_logprobs,
        )  # fmt: skip


class Group:
    """Requests that were submitted together, read together: an asynchronous iterator of ``(index, chunk)``.

    Leaving it early (``abort``, or ``aclose`` of a generator around it) ends all that are still open.
    """

    def __init__(self, abort: Callable[[Sequence[Stream]], None]) -> None:
        self.streams: list[Stream] = []
        self._abort = abort
        self._ready: dict[int, None] = {}  # an ordered set: who had news first is read first
        self._news = asyncio.Event()
        self._handed = False

    def add(self, stream: Stream) -> None:
        """Take in the next stream (before anything is sent to the engine)."""
        self.streams.append(stream)

    def waker(self, index: int) -> Callable[[], None]:
        """What stream ``index`` calls when it has news."""

        def wake() -> None:
            self._ready[index] = None
            self._news.set()

        return wake

    def abort(self) -> None:
        """End what is still open. Never waits, so it works in a handler that is being cancelled. Idempotent."""
        self._abort([stream for stream in self.streams if not stream.done])

    def __aiter__(self) -> Group:
        return self

    async def __anext__(self) -> tuple[int, Chunk]:
        if self._handed and self._ready:  # many choices have news at once: others have their turn between them
            await asyncio.sleep(0)
        self._handed = True
        while True:
            while self._ready:
                index = next(iter(self._ready))
                del self._ready[index]
                chunk = self.streams[index].take()
                if chunk is not None:
                    if not self.streams[index].exhausted and self.streams[index].done:
                        self.waker(index)()  # an error comes after the last news
                    return index, chunk
            if all(stream.exhausted for stream in self.streams):
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()


class Gather:
    """Joins the chunks of one request into its completion."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    def add(self, chunk: Chunk) -> Completion | None:
        """Take in a chunk; the last one gives the completion."""
        self._text.append(chunk.text)
        self._tokens.extend(chunk.token_ids)
        self._logprobs.extend(chunk.logprobs)
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs = chunk.prompt_logprobs
        if chunk.finish_reason is None:
            return None
        return Completion(
            "".join(self._text),
            tuple(self._tokens),
            chunk.finish_reason,
            chunk.detail,
            chunk.prompt_tokens,
            chunk.cached_tokens,
            tuple(self._logprobs) or None,
            self._prompt_logprobs,
        )


def embedded(stream: Stream, last: Chunk | Completion) -> Embedding:
    """What a request that pools came to. Raises ``EngineError`` where it ended without a vector."""
    if not stream.vector:
        raise EngineError(f"there is no embedding: the request ended with {last.finish_reason}: {last.detail}")
    return Embedding(stream.vector, last.prompt_tokens, last.cached_tokens)
