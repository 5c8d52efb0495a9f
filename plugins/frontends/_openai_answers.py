"""What clients get back: the JSON of both endpoints, whole and in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from engine.core.outputs import Chunk, Completion


class Answers:
    """Builds the objects of one request. ``index`` counts choices: prompt * n + choice."""

    prefix = "cmpl"
    whole_object = "text_completion"
    piece_object = "text_completion"

    def __init__(self, model: str, n: int, with_usage: bool) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._n = n
        self._with_usage = with_usage

    def openings(self, count: int) -> list[dict[str, Any]]:
        """What a stream begins with, before any token."""
        return []

    def piece(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """One piece of a stream."""
        return self._event(index, {"text": chunk.text}, chunk)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self.usage(completions)}

    def last(self, completions: Sequence[Completion]) -> dict[str, Any] | None:
        """The usage chunk at the end of a stream, if it was asked for."""
        if not self._with_usage:
            return None
        return {**self._head, "object": self.piece_object, "choices": [], "usage": self.usage(completions)}

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Token counts. A prompt counts once, however many choices it has."""
        firsts = completions[:: self._n]
        prompt = sum(completion.prompt_tokens for completion in firsts)
        output = sum(len(completion.token_ids) for completion in completions)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(completion.cached_tokens for completion in firsts)},
        }

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {"index": index, "text": completion.text, "logprobs": None, **_reason(completion)}

    def _event(self, index: int, content: dict[str, Any], chunk: Chunk | None) -> dict[str, Any]:
        reason = _reason(chunk) if chunk is not None else {"finish_reason": None}
        event = {
            **self._head,
            "object": self.piece_object,
            "choices": [{"index": index, **content, "logprobs": None, **reason}],
        }
        return {**event, "usage": None} if self._with_usage else event


class ChatAnswers(Answers):
    """The same for conversations."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def openings(self, count: int) -> list[dict[str, Any]]:
        """Every choice begins with its role."""
        return [self._event(index, {"delta": {"role": "assistant", "content": ""}}, None) for index in range(count)]

    def piece(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """One piece of a stream."""
        return self._event(index, {"delta": {"content": chunk.text} if chunk.text else {}}, chunk)

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, **_reason(completion)}


def _reason(part: Chunk | Completion) -> dict[str, Any]:
    """Why a choice ended; ``finish_detail`` says which stop string or token it was, or which limit."""
    if part.detail is None:
        return {"finish_reason": part.finish_reason}
    return {"finish_reason": part.finish_reason, "finish_detail": part.detail}
