"""How a body is read: strictly. A field that would be ignored is refused by name, unless its value changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.core.errors import InvalidRequest, suggest
from engine.plugins.frontends._bounds import Most, check_parts
from engine.plugins.frontends._piecemeal import MISSING, UNKNOWN, UnknownField, fields_of, value_of

MOST_TEXT = 1024  # characters of what policies are handed: a user's or a conversation's name
LONGEST_NAME = 80  # characters of a name that a client made up, when it is told back
DEPTH_SHOWN = 3  # of lists and objects in lists and objects
INVALID, UNSUPPORTED = "invalid_value", "unsupported"
FEW = Most(elements=1024)
"""Of a field that is no list: of a choice, an option, a switch."""
ANY = Most()
WRITTEN = frozenset({"tools", "response_format", "structured_outputs", "text"})
"""Fields with JSON schemas: numbers in them stay as they are written."""
NO_BOUNDS: Mapping[str, Most] = {}


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is v or (type(value) is type(v) and value == v) for v in values)


def _number(expected: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == expected


def _empty(value: Any) -> bool:
    return value in ([], {}, "")


def _text(value: Any) -> bool:
    return isinstance(value, str)


# Fields of the OpenAI interface (and of its usual extensions) that this server does not act on, with the values at
# which ignoring them is right. ``None`` always is.
HARMLESS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "audio": (_empty, "nothing"),
    "best_of": (_number(1), "1"),
    "echo": (_one_of(False), "false"),
    "function_call": (_one_of("none", "auto"), '"none"'),
    "functions": (_empty, "[]"),
    "logprobs": (_one_of(False), "false"),
    "parallel_tool_calls": (_one_of(True, False), "true or false"),
    "tool_choice": (_one_of("none", "auto"), '"none"'),
    "tools": (_empty, "[]"),
    "modalities": (lambda value: value == ["text"], '["text"]'),
    "prediction": (_empty, "nothing"),
    "safety_identifier": (_text, "a string"),
    "service_tier": (_one_of("auto", "default"), '"auto" or "default"'),
    "store": (_one_of(False), "false"),
    "suffix": (_empty, '""'),
    "top_logprobs": (_number(0), "0"),
}


class Strict(BaseModel):
    """No coercion, no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Body(Strict):
    """A whole request body."""

    @classmethod
    def parse(cls, body: bytes, most: Mapping[str, Most] = NO_BOUNDS) -> Self:
        """A request from its JSON text.

        Args:
            most: how much each field may hold.

        Raises:
            InvalidRequest: names the field, also where it is not supported, or holds more than it may.
        """
        try:
            return cls.model_validate(_supported(cls, body, most))
        except ValidationError as error:
            raise _explain(error) from error


def _supported(cls: type[Body], body: bytes, most: Mapping[str, Most]) -> dict[str, Any]:
    """The fields to act on. Raises ``InvalidRequest`` for what could only be ignored, and for what is too much."""
    names = {*cls.model_fields, *HARMLESS}
    try:
        given = fields_of(body, names)
    except UnknownField as error:
        name = cut(error.name)
        raise InvalidRequest(name, f"unknown field; {suggest(name, names)}", code=UNKNOWN) from None
    kept: dict[str, Any] = {}
    for name, text in given.items():
        check_parts(text, most.get(name, FEW if most else ANY), name)
        value = value_of(text, as_written=name in WRITTEN)
        if name in cls.model_fields:
            kept[name] = value
        elif value is not None and not HARMLESS[name][0](value):
            words = f"is not supported: the only accepted value is {HARMLESS[name][1]}"
            raise InvalidRequest(name, words, code=UNSUPPORTED)
    return kept


def _explain(error: ValidationError) -> InvalidRequest:
    """The first fault in words, at the place that the client wrote."""
    faults = error.errors(include_url=False)
    # Of a union's faults (one for each branch) the deepest is that of the branch which was meant.
    fault = max((f for f in faults if f["loc"][:1] == faults[0]["loc"][:1]), key=lambda f: len(f["loc"]))
    where = _dotted(fault["loc"])
    if fault["type"] == "missing":
        return InvalidRequest(where, "is required", code=MISSING)
    if fault["type"] == "extra_forbidden":
        return InvalidRequest(where, "unknown field", code=UNKNOWN)
    return InvalidRequest(where, f"{fault['msg'][0].lower()}{fault['msg'][1:]}, got {_shown(fault['input'])}")


def _shown(value: Any) -> str:
    """A value of the client's, short enough for a message, and never written at length to be cut."""
    return cut(repr(_shortened(value, DEPTH_SHOWN)))


def _shortened(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value[:LONGEST_NAME]
    if isinstance(value, list):
        return [_shortened(one, depth - 1) for one in value[:LONGEST_NAME]] if depth else []
    if isinstance(value, dict):
        some = islice(value.items(), LONGEST_NAME) if depth else ()
        return {name[:LONGEST_NAME]: _shortened(one, depth - 1) for name, one in some}
    return value


def _dotted(where: tuple[int | str, ...]) -> str:
    """``messages[0].content``. Branches of unions (``str``, models), which clients do not know, are left out."""
    text, models = "", {model.__name__ for model in Strict.__subclasses__()}
    for part in where:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in ("str", "[key]", *models) and "[" not in part:
            text += f".{cut(part)}" if text else cut(part)
    return text


def cut(text: str) -> str:
    """A text of the client's, short enough for a message."""
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 3] + "..."
