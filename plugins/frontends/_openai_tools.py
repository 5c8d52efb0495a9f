"""Tools over HTTP: what clients offer and may demand, what comes back of earlier calls, and the calls of an answer."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from engine.core.errors import InvalidRequest
from engine.core.grammar import Grammar
from engine.core.protocols import ToolParser
from engine.core.tools import CallPiece, Heard, Tool
from engine.plugins.frontends._openai_fields import UNSUPPORTED, Strict

NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
MOST_TOOLS = 128


class FunctionDefinition(Strict):
    """A function that may be called."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of an object")
    strict: bool | None = None

    def tool(self) -> Tool:
        """As the core has it."""
        return Tool(self.name, self.description or "", self.parameters or {})


class ToolDefinition(Strict):
    """A tool: a function."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    """Which function."""

    name: str


class NamedTool(Strict):
    """This tool must be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Strict):
    """A function that was called, with its arguments as JSON text."""

    name: str
    arguments: str


class MadeCall(Strict):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


Choice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class Toolset:
    """The tools that an answer may call.

    Attributes:
        required: it must call some, and say nothing else.
        named: the client said which one.
        parallel: several calls in one answer.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    named: bool = False
    parallel: bool = True

    def grammar(self, parser: ToolParser) -> Grammar | None:
        """What an answer must be, where calls are required."""
        if not self.required:
            return None
        return parser.grammar(self.tools, parallel=self.parallel and not self.named, field="tools")


def toolset_of(tools: Sequence[Tool] | None, choice: str | None, name: str | None, parallel: bool) -> Toolset | None:
    """The tools of a request; ``None`` where none may be called. Raises ``InvalidRequest``.

    Args:
        choice: ``none``, ``auto``, ``required``.
        name: of the one that must be called.
    """
    if not tools:
        if name is not None or choice == "required":
            raise InvalidRequest("tool_choice", "is only allowed when tools are given")
        return None
    if len(tools) > MOST_TOOLS:
        raise InvalidRequest("tools", f"has {len(tools)} tools, at most {MOST_TOOLS} are allowed", code="above_limit")
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools", "two tools have the same name")
    if choice == "none":
        return None
    if name is None:
        return Toolset(tuple(tools), required=choice == "required", parallel=parallel)
    if name not in names:
        raise InvalidRequest("tool_choice", f"{name!r} is none of the tools: {', '.join(names)}")
    chosen = tuple(tool for tool in tools if tool.name == name)
    return Toolset(chosen, required=True, named=True, parallel=False)


def check_beside(toolset: Toolset | None, grammar: Grammar | None) -> None:
    """An answer cannot be a call and keep to a grammar as well. Raises ``InvalidRequest``."""
    if toolset is not None and grammar is not None:
        words = "cannot be kept to by an answer that may call tools: say tool_choice none, or leave one of them out"
        raise InvalidRequest(grammar.field, words, code=UNSUPPORTED)


@dataclass(frozen=True)
class Said:
    """New of an answer: words, and pieces of calls, of which the first of each has an id and a name."""

    content: str = ""
    calls: tuple[tuple[str | None, CallPiece], ...] = ()


class CallReader:
    """Reads one answer for calls, and gives each an id.

    Attributes:
        calls: id, name and arguments of each, so far.
        content: all words so far.
    """

    def __init__(self, parser: ToolParser, toolset: Toolset) -> None:
        self._stream = parser.stream()
        self._most = None if toolset.parallel else 1
        self.calls: list[list[str]] = []
        self.content = ""

    def push(self, text: str, *, last: bool) -> Said:
        """More of the answer. Mutates. Where one call is all there may be, what comes after it is left out."""
        heard = [self._stream.push(text), *([self._stream.finish()] if last else [])]
        content, calls = "", list[tuple[str | None, CallPiece]]()
        for one in heard:
            content += "" if self._full else one.content
            calls += self._named(one)
        self.content += content
        return Said(content, tuple(calls))

    @property
    def _full(self) -> bool:
        return self._most is not None and len(self.calls) >= self._most

    def _named(self, heard: Heard) -> Iterable[tuple[str | None, CallPiece]]:
        for piece in heard.calls:
            if self._most is not None and piece.number >= self._most:
                continue
            if piece.name is not None:
                self.calls.append([f"call_{uuid.uuid4().hex[:24]}", piece.name, piece.arguments])
                yield self.calls[-1][0], piece
            else:
                self.calls[piece.number][2] += piece.arguments
                yield None, piece


def whole_calls(reader: CallReader) -> list[dict[str, Any]]:
    """Calls of a whole answer."""
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in reader.calls
    ]


def call_deltas(said: Said) -> list[dict[str, Any]]:
    """Pieces of calls in a stream."""
    deltas: list[dict[str, Any]] = []
    for call_id, piece in said.calls:
        if call_id is None:
            deltas.append({"index": piece.number, "function": {"arguments": piece.arguments}})
        else:
            function = {"name": piece.name, "arguments": piece.arguments}
            deltas.append({"index": piece.number, "id": call_id, "type": "function", "function": function})
    return deltas
