"""``POST /v1/responses`` for text: what clients may send. It is read as the conversation that it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from engine.core.errors import InvalidRequest
from engine.core.grammar import Grammar
from engine.core.tools import Tool
from engine.plugins.frontends._bounds import InParts, InSlices, Most, Off
from engine.plugins.frontends._openai_fields import MOST_TEXT, NO_BOUNDS, Body, Strict
from engine.plugins.frontends._openai_schema import CacheOptions, ChatRequest
from engine.plugins.frontends._openai_tools import NAME, Toolset, toolset_of

FIELDS = {
    "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "messages": "input",
    "response_format": "text.format", "logprobs": "include",
}  # fmt: skip
"""What the conversation calls a field, and what the client has called it."""


class Piece(Strict):
    """A piece of content. Only text is understood; what an answer of ours carries may come back."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = None


class InputMessage(Strict):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Piece], InSlices]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(Strict):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class InputOutput(Strict):
    """What a function gave back."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[Piece], InSlices]
    id: str | None = None
    status: str | None = None


class TextFormat(Strict):
    """``text``, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(Strict):
    """A function that may be called."""

    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Strict):
    """This one must be called."""

    type: Literal["function"]
    name: str


class ResponseStreamOptions(Strict):
    """``include_obfuscation`` must be off."""

    include_obfuscation: Off | None = None


class ResponsesRequest(Body):
    """``POST /v1/responses``. Nothing is stored: ``store`` may be false or left out."""

    model: str | None = Field(None, description="must be the served model; may be left out")
    input: str | Annotated[list[InputMessage | InputCall | InputOutput], InSlices] = Field(
        description="text, or a conversation"
    )
    instructions: str | None = Field(None, description="the system's message")
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], InSlices] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0)
    metadata: Annotated[dict[str, str], InParts] | None = None
    user: str | None = Field(None, max_length=MOST_TEXT)
    prompt_cache_key: str | None = Field(None, max_length=MOST_TEXT)
    store: Off | None = Field(None, description="nothing is stored")
    background: Off | None = None
    truncation: Literal["disabled"] | None = None
    seed: int | None = Field(None, description="not OpenAI's: as in chat")
    top_k: int | None = Field(None, description="not OpenAI's: as in chat")
    min_p: float | None = Field(None, description="not OpenAI's: as in chat")
    priority: int | None = Field(None, description="not OpenAI's: as in chat")
    deadline_ms: int | None = Field(None, description="not OpenAI's: as in chat", ge=1)
    cache: CacheOptions | None = Field(None, description="not OpenAI's: as in chat")

    @classmethod
    def parse(cls, body: bytes, most: Mapping[str, Most] = NO_BOUNDS) -> Self:
        """A request from its JSON text. Raises ``InvalidRequest`` naming the field."""
        request = super().parse(body, most)
        if request.stream_options is not None and not request.stream:
            raise InvalidRequest("stream_options", "is only allowed when stream is true")
        if request.input == []:
            raise InvalidRequest("input", "is empty")
        return request

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return bool(self.include) or self.top_logprobs is not None

    def chat(self) -> AsChat:
        """The same as a conversation. Raises ``InvalidRequest``."""
        same = ("model", "temperature", "top_p", "stream", "metadata", "user", "prompt_cache_key", "seed", "top_k",
                "min_p", "priority", "deadline_ms", "cache")  # fmt: skip
        wanted = self.text.format if self.text is not None else None
        return AsChat.model_validate(
            {
                **{name: getattr(self, name) for name in same},
                "messages": self._messages(),
                "max_completion_tokens": self.max_output_tokens,
                "logprobs": self.wants_logprobs or None,
                "top_logprobs": self.top_logprobs,
                "response_format": None if wanted is None else _format(wanted),
                "offered": self._toolset(),
            }
        )

    def _toolset(self) -> Toolset | None:
        chosen = self.tool_choice
        named = chosen.name if isinstance(chosen, FunctionChoice) else None
        tools = [Tool(one.name, one.description or "", one.parameters or {}) for one in self.tools or ()]
        word = None if isinstance(chosen, FunctionChoice) else chosen
        return toolset_of(tools, word, named, self.parallel_tool_calls is not False)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            if isinstance(item, InputMessage):
                messages.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, InputOutput):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            else:
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(call)
        return messages


class AsChat(ChatRequest):
    """A response's request as the conversation that it is."""

    offered: Any = None

    def toolset(self) -> Toolset | None:
        """The tools that may be called."""
        offered: Toolset | None = self.offered
        return offered

    def grammar(self) -> Grammar | None:
        """What the answer must be, under the name that the client has used."""
        grammar = super().grammar()
        return None if grammar is None else replace(grammar, field="text.format")


def renamed(error: InvalidRequest) -> InvalidRequest:
    """The same fault, at the field that the client has named."""
    first, dot, rest = error.field.partition(".")
    field = FIELDS.get(first.partition("[")[0], first)
    return InvalidRequest(field + dot + rest if field == first else field, error.message, code=error.code)


def _text(content: str | list[Piece]) -> str:
    return content if isinstance(content, str) else "".join(piece.text for piece in content)


def _format(wanted: TextFormat) -> Mapping[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema_ is None:
        raise InvalidRequest("text.format.schema", "is required", code="missing")
    return {"type": "json_schema", "json_schema": {"name": wanted.name or "answer", "schema": wanted.schema_}}
