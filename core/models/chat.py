"""Chat templates: a conversation to the one text that the model was trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.core.errors import InvalidRequest, ModelError

FIELD = "messages"


class _Refusal(Exception):
    """What a template says through ``raise_exception``."""


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training; here its content is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse up to ``{% endgeneration %}`` and return what is between."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled Jinja template in a sandbox, with the globals that Hugging Face's templates expect. Thread-safe.

    Args:
        source: the template's text.
        variables: what the template may refer to besides ``messages``, e.g. ``bos_token``.

    Attribute ``takes_tools``: it says something of ``tools``.

    Raises:
        ModelError: the template does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._variables = dict(variables)
        try:
            parsed = environment.parse(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(parsed)
            self._template = environment.from_string(parsed)
        except TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The conversation as text. Does not mutate ``messages``.

        Args:
            messages: each with ``role`` and ``content`` (text, ``None``, or a list of parts of type ``text``).
            add_generation_prompt: end with the words that open the assistant's turn.
            extra: more variables for the template, e.g. ``tools``.

        Raises:
            InvalidRequest: malformed messages, or ones that the template refuses, with the template's own words.
        """
        variables = {**self._variables, **extra, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(messages=normalise(messages), **variables)
        except InvalidRequest:
            raise
        except _Refusal as refusal:
            raise InvalidRequest(FIELD, str(refusal)) from None
        except Exception as error:  # templates do arithmetic on what clients send: anything may come out
            raise InvalidRequest(FIELD, f"the model's chat template cannot render these: {error}") from error


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages as templates expect them. Does not mutate.

    Content ``None`` becomes ``""`` (the turn stays), a list of text parts is joined, empty ``tool_calls`` go away.

    Raises:
        InvalidRequest: no messages, one that is no object or has no role, or content that is not text.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest(FIELD, "must be a list of at least one message")
    return [_message(number, message) for number, message in enumerate(messages)]


def _message(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(FIELD, f"message {number} must be an object with a role")
    result = dict(message)
    result["content"] = _content(number, message.get("content"))
    if not result.get("tool_calls", True):
        del result["tool_calls"]
    return result


def _content(number: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(_part(number, part) for part in content)
    raise InvalidRequest(FIELD, f"content of message {number} must be text, a list of text parts or null")


def _part(number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequest(FIELD, f"message {number} has a part of type {kind!r}; this model takes text only")
    return str(part["text"])


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which would change what the model reads."""
    dump: Callable[..., str] = json.dumps
    return dump(value, ensure_ascii=ensure_ascii, indent=indent, **options)
