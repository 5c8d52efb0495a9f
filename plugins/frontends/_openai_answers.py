"""What clients get back: the JSON of both endpoints, whole and in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.core.outputs import Chunk, Completion
from engine.core.protocols import ToolParser
from engine.core.sampling import SamplingParams
from engine.plugins.frontends._openai_logprobs import (
    Echo,
    Names,
    Offsets,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from engine.plugins.frontends._openai_tools import CallReader, Toolset, call_deltas, whole_calls

if TYPE_CHECKING:
    from engine.core.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Wish:
    """What the answer to one request is to hold.

    Attributes:
        params: of every choice.
        with_usage: a stream ends with the usage.
        echo: the prompts, where each choice begins with its own.
        scores_only: nothing but the prompts.
        prompt_logprobs: those of the prompts were asked for by name.
        toolset: tools that the answer may call, which ``parser`` reads off it.
    """

    params: SamplingParams
    with_usage: bool = False
    echo: tuple[Echo, ...] | None = None
    scores_only: bool = False
    prompt_logprobs: bool = False
    toolset: Toolset | None = None
    parser: ToolParser | None = None

    def hidden(self, tokenizer: Tokenizer | None) -> frozenset[int]:
        """Tokens that are left out of the text."""
        return tokenizer.special_ids if tokenizer is not None and self.params.skip_special_tokens else frozenset()

    def reader(self) -> CallReader | None:
        """What reads one choice for calls, where tools were offered."""
        if self.toolset is None or self.parser is None:
            return None
        return CallReader(self.parser, self.toolset)


class Answers:
    """Builds the objects of one request. ``index`` counts choices: prompt * n + choice."""

    prefix = "cmpl"
    whole_object = "text_completion"
    piece_object = "text_completion"

    def __init__(self, model: str, wish: Wish, tokenizer: Tokenizer | None) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._wish = wish
        self._names = Names(tokenizer)
        self._hidden = wish.hidden(tokenizer)
        self._offsets: dict[int, Offsets] = {}

    def openings(self, count: int) -> list[dict[str, Any]]:
        """What a stream begins with, before any token."""
        return []

    def piece(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """One piece of a stream; ``None`` where there is nothing to tell yet."""
        begun = index in self._offsets
        return self._event(index, {"text": self._text(index, chunk, begun=begun)}, self._logprobs(index, chunk), chunk)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self.usage(completions)}

    def last(self, ends: Sequence[Chunk]) -> dict[str, Any] | None:
        """The usage chunk at the end of a stream, if it was asked for."""
        if not self._wish.with_usage:
            return None
        return {**self._head, "object": self.piece_object, "choices": [], "usage": self.usage(ends)}

    def usage(self, ends: Sequence[Completion | Chunk]) -> dict[str, Any]:
        """Token counts. A prompt counts once, however many choices it has."""
        firsts = ends[:: self._wish.params.n]
        prompt = sum(end.prompt_tokens for end in firsts)
        output = 0 if self._wish.scores_only else sum(map(generated, ends))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in firsts)},
        }

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": self._text(index, completion, begun=False),
            "logprobs": self._logprobs(index, completion),
            **_reason(completion),
        }
        if self._wish.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(self._names, completion.prompt_logprobs or ())
        return choice

    def _text(self, index: int, part: Chunk | Completion, *, begun: bool) -> str:
        text = "" if self._wish.scores_only else part.text
        echo = self._echo(index)
        return text if echo is None or begun else echo.text + text

    def _echo(self, index: int) -> Echo | None:
        return None if self._wish.echo is None else self._wish.echo[index // self._wish.params.n]

    def _logprobs(self, index: int, part: Chunk | Completion) -> dict[str, Any] | None:
        """Of what the part brings; the first one brings the echoed prompt too."""
        offsets = self._offsets.get(index)
        begun = offsets is not None
        if offsets is None:
            offsets = self._offsets[index] = Offsets(self._names, self._hidden)
        if self._wish.params.logprobs is None:
            return None
        found = () if self._wish.scores_only else part.logprobs or ()
        echo = None if begun else self._echo(index)
        return completion_logprobs(self._names, offsets, found, echo, part.prompt_logprobs or ())

    def _event(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None, chunk: Chunk | None
    ) -> dict[str, Any]:
        reason = _reason(chunk) if chunk is not None else {"finish_reason": None}
        event = {
            **self._head,
            "object": self.piece_object,
            "choices": [{"index": index, **content, "logprobs": logprobs, **reason}],
        }
        return {**event, "usage": None} if self._wish.with_usage else event


class ChatAnswers(Answers):
    """The same for conversations."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def __init__(self, model: str, wish: Wish, tokenizer: Tokenizer | None) -> None:
        super().__init__(model, wish, tokenizer)
        self._readers: dict[int, CallReader | None] = {}

    def openings(self, count: int) -> list[dict[str, Any]]:
        """Every choice begins with its role."""
        opening = {"delta": {"role": "assistant", "content": ""}}
        return [self._event(index, opening, None, None) for index in range(count)]

    def piece(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """One piece of a stream; ``None`` where what came may be the beginning of a call."""
        reader = self._reader(index)
        if reader is None:
            content = {"delta": {"content": chunk.text} if chunk.text else {}}
            return self._event(index, content, self._logprobs(index, chunk), chunk)
        said = reader.push(chunk.text, last=chunk.finish_reason is not None)
        delta: dict[str, Any] = {"content": said.content} if said.content else {}
        if said.calls:
            delta["tool_calls"] = call_deltas(said)
        if not delta and not chunk.logprobs and chunk.finish_reason is None:
            return None
        event = self._event(index, {"delta": delta}, self._logprobs(index, chunk), chunk)
        event["choices"][0].update(self._called(reader, chunk))
        return event

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer."""
        answer = super().whole(completions)
        if self._wish.prompt_logprobs:
            answer["prompt_logprobs"] = prompt_logprobs(self._names, completions[0].prompt_logprobs or ())
        return answer

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        logprobs = self._logprobs(index, completion)
        choice = {"index": index, "message": message, "logprobs": logprobs, **_reason(completion)}
        if (reader := self._reader(index)) is not None:
            reader.push(completion.text, last=True)
            message["content"] = reader.content if reader.content or not reader.calls else None
            if reader.calls:
                message["tool_calls"] = whole_calls(reader)
            choice.update(self._called(reader, completion))
        return choice

    def _reader(self, index: int) -> CallReader | None:
        """A choice's own, the same whenever asked."""
        if index not in self._readers:
            self._readers[index] = self._wish.reader()
        return self._readers[index]

    def _called(self, reader: CallReader, part: Chunk | Completion) -> dict[str, Any]:
        """An answer that ended by itself with calls ended because of them; not so where one was named, as OpenAI."""
        named = self._wish.toolset is not None and self._wish.toolset.named
        return {"finish_reason": "tool_calls"} if reader.calls and part.finish_reason == "stop" and not named else {}

    def _logprobs(self, index: int, part: Chunk | Completion) -> dict[str, Any] | None:
        return None if self._wish.params.logprobs is None else chat_logprobs(self._names, part.logprobs or ())


def generated(end: Completion | Chunk) -> int:
    """How many tokens a choice has, at its end."""
    return len(end.token_ids) if isinstance(end, Completion) else end.output_tokens


def _reason(part: Chunk | Completion) -> dict[str, Any]:
    """Why a choice ended; ``finish_detail`` says which stop string or token it was, or which limit."""
    if part.detail is None:
        return {"finish_reason": part.finish_reason}
    return {"finish_reason": part.finish_reason, "finish_detail": part.detail}
