"""Streams of OpenAI-compatible servers, read: when tokens came, how many, and how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from engine.lab.driving import Answer

MOST_DETAIL = 300  # characters


class AnswerStream:
    """What the events of one stream come to. Fills in an answer."""

    def __init__(self, answer: Answer, chat: bool) -> None:
        self._answer, self._chat = answer, chat
        self._usage: Mapping[str, Any] | None = None
        self._bare_end = False  # the last event that counts brought an end and no text
        self.text: list[str] = []
        self.over = False

    def take(self, event: Any) -> None:
        """The next event; ``None`` is the last. Mutates."""
        now, answer = time.perf_counter(), self._answer
        if event is None:
            self.over = True
            return
        if not isinstance(event, dict):
            raise ValueError(f"an event is no object: {str(event)[:80]}")
        if event.get("error"):
            answer.finish, answer.detail, self.over = _failure(event["error"])
            return
        for choice in event.get("choices") or ():
            text = self._text(choice)
            reason = choice.get("finish_reason")
            if text is not None:
                answer.times.append(now)
                self.text.append(text)
                self._bare_end = not text and bool(reason)
            if reason:
                answer.finish = "length" if reason == "length" else "stop"
        self._usage = event.get("usage") or self._usage

    def _text(self, choice: Mapping[str, Any]) -> str | None:
        """What it says; ``None``: it is only the opening of an answer."""
        if not self._chat:
            return choice.get("text") or ""
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or ""
        return None if "role" in delta and not text and not choice.get("finish_reason") else str(text)

    def end(self) -> None:
        """Nothing more comes. Mutates the answer."""
        answer, usage = self._answer, self._usage or {}
        answer.tokens = int(usage.get("completion_tokens") or 0) or len(answer.times)
        answer.prompt = int(usage.get("prompt_tokens") or 0) or answer.prompt
        answer.cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if self._bare_end and len(answer.times) > answer.tokens:
            answer.times.pop()
        if answer.finish in ("stop", "length") and not answer.times:
            answer.finish, answer.detail = "empty", "it ended without any token"


async def events_of(response: httpx.Response) -> AsyncIterator[Any]:
    """JSON of each event of a stream of server-sent events; ``None`` for ``[DONE]``. Raises ``ValueError``."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                yield None if payload == b"[DONE]" else json.loads(payload)


def _failure(error: Any) -> tuple[str, str, bool]:
    """How a request ended whose stream tells of an error."""
    told = error if isinstance(error, dict) else {"message": error}
    words = str(told.get("message"))[:MOST_DETAIL]
    code = str(told.get("code") or "")
    return ("timeout" if code == "deadline_exceeded" else "error"), f"{code}: {words}" if code else words, True


def words_of(body: bytes) -> str:
    """What an answer that is none says."""
    try:
        told = json.loads(body)
        error = told.get("error", told)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:MOST_DETAIL]
    except (ValueError, AttributeError):
        return body.decode(errors="replace")[:MOST_DETAIL]


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_DETAIL]
