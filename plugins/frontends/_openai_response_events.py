"""What ``/v1/responses`` gives back: items as they grow, event after event, in the order that OpenAI's clients expect.

A whole answer is what its events come to: both are made in one place.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.core.outputs import Chunk, Completion
from engine.core.sampling import TokenLogprobs
from engine.core.transfers import HINT
from engine.plugins.frontends._aside import Aside
from engine.plugins.frontends._errors import HTTPError
from engine.plugins.frontends._openai_answers import Wish, generated
from engine.plugins.frontends._openai_logprobs import Names, Offsets, chat_logprobs
from engine.plugins.frontends._openai_responses import FunctionChoice, ResponsesRequest

if TYPE_CHECKING:
    from engine.core.models.tokenizer import Tokenizer

Event = dict[str, Any]


class ResponseEvents:
    """The events of one response, and the response as it is by then."""

    def __init__(self, model: str, request: ResponsesRequest, wish: Wish, tokenizer: Tokenizer | None) -> None:
        self._number = 0
        self._names = Names(tokenizer)
        self._logs = request.wants_logprobs
        self._reader = wish.reader()
        self._hidden = wish.hidden(tokenizer)
        self._held: list[Any] = []  # log-probabilities of tokens that are neither words nor a call yet
        self._open: dict[str, Any] | None = None
        self._output: list[dict[str, Any]] = []
        self.response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model,
            "status": "in_progress", "output": self._output, "error": None, "incomplete_details": None, "usage": None,
            **_echoed(request),
        }  # fmt: skip

    async def told(
        self, pieces: AsyncIterator[Chunk], failure: Callable[[Exception], HTTPError], aside: Aside
    ) -> AsyncIterator[Event]:
        """A stream's events, to its end. An error in the middle makes the response a failed one."""
        for event in self.begun():
            yield event
        try:
            async for chunk in pieces:
                for event in await aside.build([chunk], partial(self.piece, chunk)):
                    yield event
                if chunk.finish_reason is not None:
                    for event in [*self._close(_status(chunk)), self.end(chunk)]:
                        yield event
        except Exception as error:
            for event in self.failed(failure(error)):
                yield event

    def whole(self, completion: Completion) -> dict[str, Any]:
        """The whole response."""
        for text, found, last in self._tokens(completion):
            self._told(text, found, last=last)
        self._close(_status(completion))
        self.end(completion)
        return self.response

    def begun(self) -> list[Event]:
        """What a stream begins with."""
        return [self._event("response.created", response=self._shown()),
                self._event("response.in_progress", response=self._shown())]  # fmt: skip

    def piece(self, chunk: Chunk | Completion) -> list[Event]:
        """What a piece of the answer brings; the last one closes what is open."""
        return self._told(chunk.text, chunk.logprobs or (), last=chunk.finish_reason is not None)

    def end(self, last: Chunk | Completion) -> Event:
        """The last event: the response is complete, or was cut."""
        self._finish(_status(last))
        if last.finish_reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        output = generated(last)
        self.response["usage"] = {
            "input_tokens": last.prompt_tokens,
            "input_tokens_details": {"cached_tokens": last.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": last.prompt_tokens + output,
        }
        return self._event(f"response.{self.response['status']}", response=self._shown())

    def failed(self, failure: HTTPError) -> list[Event]:
        """The engine could not go on: the response has failed, and why."""
        self._finish("failed")
        self.response["error"] = {"code": "server_error", "message": failure.message}
        return [
            self._event("error", code=failure.code, message=failure.message, param=failure.param),
            self._event("response.failed", response=self._shown()),
        ]

    # ---- inside

    def _tokens(self, completion: Completion) -> Iterator[tuple[str, Sequence[TokenLogprobs], bool]]:
        """A whole answer as a stream brings it, so that log-probabilities are told with the same words."""
        text, found = completion.text, completion.logprobs or ()
        if not self._logs or self._reader is None or not found:
            yield text, found, True
            return
        offsets = Offsets(self._names, self._hidden)
        ends = [*[offsets.next(one.token) for one in found][1:], len(text)]
        begin = 0
        for number, (one, end) in enumerate(zip(found, ends, strict=True), 1):
            yield text[begin:end], (one,), number == len(found)
            begin = max(begin, end)

    def _told(self, text: str, found: Sequence[TokenLogprobs], *, last: bool) -> list[Event]:
        """What text and its tokens bring. Tokens that make a call are told without log-probabilities."""
        logs = chat_logprobs(self._names, found)["content"] if self._logs else []
        if self._reader is None:
            return self._text(text, logs) if text or logs else []
        said = self._reader.push(text, last=last)
        logs = [*self._held, *logs]
        self._held = [] if said.parts else logs
        events: list[Event] = []
        for part in said.parts:
            if isinstance(part, str):
                events += self._text(part, logs)
                logs = []
                continue
            if part.call_id is not None:
                events += [*self._close(), *self._begin_call(part.call_id, part.piece.name or "")]
            events += self._argue(part.piece.arguments)
        if last and self._held and self._open is not None and self._open["type"] == "message":
            events += self._text("", self._held)  # of the token that ended it
        return events

    def _event(self, kind: str, **content: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **content}

    def _shown(self) -> dict[str, Any]:
        """As of now, at the beginning or the end: what is told must not change with what comes."""
        return {**self.response, "output": [*self._output]}

    def _finish(self, status: str) -> None:
        self.response["status"] = status
        if status == "completed":
            self.response["completed_at"] = int(time.time())

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output) - 1}

    def _begin(self, item: dict[str, Any]) -> Event:
        self._open = item
        self._output.append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=shown)

    def _text(self, text: str, logs: Sequence[Any]) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != "message":
            events += self._close()
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "in_progress"}
            events.append(self._begin({**item, "content": [part]}))
            shown = {**part, "logprobs": []}
            events.append(self._event("response.content_part.added", **self._place(), content_index=0, part=shown))
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        part["logprobs"] += logs
        delta = {"delta": text, "logprobs": list(logs)}
        events.append(self._event("response.output_text.delta", **self._place(), content_index=0, **delta))
        return events

    def _begin_call(self, call_id: str, name: str) -> list[Event]:
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress", "call_id": call_id}
        return [self._begin({**item, "name": name, "arguments": ""})]

    def _argue(self, text: str) -> list[Event]:
        if not text:
            return []
        assert self._open is not None
        self._open["arguments"] += text
        return [self._event("response.function_call_arguments.delta", **self._place(), delta=text)]

    def _close(self, status: str = "completed") -> list[Event]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "message":
            [part] = item["content"]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            events = [
                self._event("response.output_text.done", **self._place(), content_index=0, **done),
                self._event("response.content_part.done", **self._place(), content_index=0, part={**part}),
            ]
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **self._place(), **said)]
        events.append(self._event("response.output_item.done", output_index=len(self._output) - 1, item={**item}))
        self._open = None
        return events


def _status(last: Chunk | Completion) -> str:
    return "incomplete" if last.finish_reason == "length" else "completed"


def _echoed(request: ResponsesRequest) -> dict[str, Any]:
    """What of the request a response repeats."""
    chosen = request.tool_choice
    wanted = request.text.format if request.text is not None else None
    text = {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
    tools = [
        {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters,
         "strict": tool.strict}
        for tool in request.tools or ()
    ]  # fmt: skip
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": {name: value for name, value in (request.metadata or {}).items() if not name.startswith(HINT)},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": None,
        "store": False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": text},
        "tool_choice": chosen.model_dump() if isinstance(chosen, FunctionChoice) else chosen or "auto",
        "tools": tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
