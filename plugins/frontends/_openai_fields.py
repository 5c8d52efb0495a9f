"""How a body is read: strictly. A field that would be ignored is refused by name, unless its value changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from engine.core.errors import InvalidRequest, suggest

MOST_TEXT = 1024  # characters of what policies are handed: a user's or a conversation's name
LONGEST_NAME = 80  # characters of a name that a client made up, when it is told back
INVALID, UNKNOWN, UNSUPPORTED, MISSING = "invalid_value", "unknown_field", "unsupported", "missing"


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
    def parse(cls, body: bytes) -> Self:
        """A request from its JSON text. Raises ``InvalidRequest`` naming the field, also where it is not supported."""
        try:
            return cls.model_validate(_supported(cls, _read_json(body)))
        except ValidationError as error:
            raise _explain(error) from error


def _read_json(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise InvalidRequest("body", "is empty: send a JSON object", code=MISSING)
    try:
        data = msgspec.json.decode(body)  # strict: no NaN, no trailing text
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("body", f"is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest("body", f"must be a JSON object, not {type(data).__name__}")
    return data


def _supported(cls: type[Body], data: dict[str, Any]) -> dict[str, Any]:
    """The fields to act on. Raises ``InvalidRequest`` for the first that could only be ignored."""
    kept: dict[str, Any] = {}
    for name, value in data.items():
        if name in cls.model_fields:
            kept[name] = value
        elif name not in HARMLESS:
            known = suggest(cut(name), [*cls.model_fields, *HARMLESS])
            raise InvalidRequest(cut(name), f"unknown field; {known}", code=UNKNOWN)
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
    shown = cut(repr(fault["input"]))
    return InvalidRequest(where, f"{fault['msg'][0].lower()}{fault['msg'][1:]}, got {shown}")


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
