"""Tools over HTTP: what clients offer and may demand, what comes back of earlier calls, and the calls of an answer."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

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


class MadePiece(NamedTuple):
    """A piece of a call; the first one has the id that the call was given, and its name."""

    call_id: str | None
    piece: CallPiece


@dataclass(frozen=True)
class Said:
    """New of an answer, in its order: words, and pieces of calls."""

    parts: tuple[str | MadePiece, ...] = ()

    @property
    def content(self) -> str:
        """All the words."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> tuple[MadePiece, ...]:
        """All pieces of calls."""
        return tuple(part for part in self.parts if isinstance(part, MadePiece))


class CallReader:
    """Reads one answer for calls, and gives each an id. Only the text matters, not how tokens cut it.

    Attributes:
        calls: id and name of each so far.
    """

    def __init__(self, parser: ToolParser, toolset: Toolset) -> None:
        self._stream = parser.stream()
        self._most = None if toolset.parallel else 1
        self.calls: list[tuple[str, str]] = []
        self._arguments: list[list[str]] = []
        self._words: list[str] = []

    @property
    def content(self) -> str:
        """All words so far."""
        return "".join(self._words)

    def arguments(self, number: int) -> str:
        """Those of a call so far."""
        return "".join(self._arguments[number])

    def push(self, text: str, *, last: bool) -> Said:
        """More of the answer. Mutates. Where one call is all there may be, what comes after it is left out."""
        parts: list[str | MadePiece] = []
        for character in text:  # one at a time: what was heard of several has no order
            parts += self._taken(self._stream.push(character))
        if last:
            parts += self._taken(self._stream.finish())
        return Said(tuple(_joined(parts)))

    def _taken(self, heard: Heard) -> Iterator[str | MadePiece]:
        begun = next((at for at, piece in enumerate(heard.calls) if piece.name is not None), len(heard.calls))
        yield from self._made(heard.calls[:begun])
        if heard.content and (self._most is None or len(self.calls) < self._most):
            self._words.append(heard.content)
            yield heard.content
        yield from self._made(heard.calls[begun:])

    def _made(self, pieces: Iterable[CallPiece]) -> Iterator[MadePiece]:
        for piece in pieces:
            if self._most is not None and piece.number >= self._most:
                continue
            call_id = None
            if piece.name is not None:
                call_id = f"call_{uuid.uuid4().hex[:24]}"
                self.calls.append((call_id, piece.name))
                self._arguments.append([])
            self._arguments[piece.number].append(piece.arguments)
            yield MadePiece(call_id, piece)


def _joined(parts: Iterable[str | MadePiece]) -> Iterator[str | MadePiece]:
    """The same with neighbours as one: words, and pieces of the same call."""
    for number, group in groupby(parts, lambda part: None if isinstance(part, str) else part.piece.number):
        same = list(group)
        if number is None:
            yield "".join(part for part in same if isinstance(part, str))
        else:
            made = [part for part in same if isinstance(part, MadePiece)]
            arguments = "".join(part.piece.arguments for part in made)
            yield made[0]._replace(piece=made[0].piece._replace(arguments=arguments))


def whole_calls(reader: CallReader) -> list[dict[str, Any]]:
    """Calls of a whole answer."""
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": reader.arguments(number)}}
        for number, (call_id, name) in enumerate(reader.calls)
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
