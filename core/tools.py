"""Tool calls: what a client offers, what a model writes, and how a conversation with them becomes a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.core.errors import InvalidRequest

if TYPE_CHECKING:
    from engine.core.models.tokenizer import Tokenizer
    from engine.core.protocols import ToolParser

JSON_SPACE = r"[\x20\x0A]{0,8}"
TOO_DEEP = "is nested too deeply"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. ``parameters`` is a JSON schema of an object, the arguments by name."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As OpenAI writes it, which is what chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.schema)}
        return {"type": "function", "function": function}

    @property
    def schema(self) -> Mapping[str, Any]:
        """The parameters; of a function that takes none, an empty object."""
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class ToolCall(NamedTuple):
    """A call as it was made: ``arguments`` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class CallPiece(NamedTuple):
    """New of the ``number``-th call: its name with the first piece, then more of its arguments' JSON text."""

    number: int
    name: str | None
    arguments: str


class Heard(NamedTuple):
    """What text turned out to be: words for the reader, and pieces of calls. Of one character (frontends push no more
    at once) the order is: pieces of the call that had begun, the words, calls that begin.
    """

    content: str = ""
    calls: tuple[CallPiece, ...] = ()


def embedded(schema: Mapping[str, Any]) -> str:
    """A JSON schema inside a Lark grammar; few blanks in a row, for small models may never stop otherwise.

    Raises ``InvalidRequest`` for one that is nested too deeply.
    """
    try:
        return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": JSON_SPACE}})
    except RecursionError as error:
        raise InvalidRequest("tools", TOO_DEEP) from error


def mended(text: str) -> str:
    """Text that UTF-8 can have: surrogates that make a pair are the character, one that stands alone is U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def rendered(
    tokenizer: Tokenizer,
    parser: ToolParser | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool] = (),
    **more: Any,
) -> str:
    """A conversation as prompt text: by the model's template, or where that knows no tools, in the parser's words.

    Args:
        messages: as OpenAI has them, arguments of calls as text.

    Raises:
        InvalidRequest: as ``Tokenizer.render_chat``; tools without a parser; what is nested too deeply to be written.
    """
    try:
        return _rendered(tokenizer, parser, messages, tools, more)
    except RecursionError as error:  # of values that the client has sent: templates and parsers write them
        raise InvalidRequest("messages", f"something in it, or in the tools, {TOO_DEEP}") from error


def _rendered(
    tokenizer: Tokenizer,
    parser: ToolParser | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    more: Mapping[str, Any],
) -> str:
    talks_of_tools = bool(tools) or any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
    if not talks_of_tools:
        return tokenizer.render_chat(messages, **more)
    if tokenizer.takes_tools:
        offered: dict[str, Any] = {"tools": [tool.plain() for tool in tools]} if tools else {}
        return tokenizer.render_chat(_for_template(messages), **offered, **more)
    if parser is None:
        raise InvalidRequest("tools", "this model's chat template knows no tools", code="unsupported")
    return tokenizer.render_chat(_in_words(parser, messages, tools), **more)


def _for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Templates write arguments themselves, from values; and some want the name of the function that answers."""
    names: dict[str, str] = {}
    plain = []
    for message in messages:
        one = dict(message)
        if calls := one.get("tool_calls"):
            one["tool_calls"] = [{**call, "function": _valued(call["function"])} for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in calls}
        if one["role"] == "tool":
            one.setdefault("name", names.get(one.get("tool_call_id", ""), ""))
        plain.append(one)
    return plain


def _valued(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(function["arguments"] or "{}")
    except RecursionError as error:
        raise InvalidRequest("messages", f"a call's arguments: {TOO_DEEP}") from error
    except ValueError:
        value = function["arguments"]  # the model wrote no JSON: it may see that
    return {**function, "arguments": value}


def _in_words(parser: ToolParser, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """For templates that know nothing of tools: instructions in the system's message, calls and answers as text."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            said = parser.answered(message.get("content") or "")
            if plain and plain[-1].get("answers"):
                plain[-1]["content"] += "\n" + said
            else:
                plain.append({"role": "user", "content": said, "answers": True})
        elif calls := message.get("tool_calls"):
            made = [ToolCall(call["function"]["name"], call["function"]["arguments"] or "{}") for call in calls]
            parts = [message.get("content") or "", parser.written(made)]
            plain.append({"role": "assistant", "content": "\n".join(filter(None, parts))})
        else:
            plain.append(dict(message))
    for message in plain:
        message.pop("answers", None)
    if tools:
        words = parser.instructions(tools)
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] = f"{plain[0].get('content') or ''}\n\n{words}".strip()
        else:
            plain.insert(0, {"role": "system", "content": words})
    return plain
