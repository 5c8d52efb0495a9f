"""Values as people write them: text to typed values, and types in words."""

from __future__ import annotations

import json
import types
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

NOTHING = frozenset({"none", "null"})
AS_THEY_STAND = (str, bytes, SecretStr, SecretBytes)
SECRET_NAMES = ("api_key", "password", "secret", "auth_token", "access_token")
HIDDEN = "***"
BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))


def from_text(text: str, annotation: Any) -> Any:
    """What ``text`` (of a flag, a variable, a file) means where a value of this type is expected.

    ``none`` is ``None`` where that is allowed; a list is ``a,b`` or JSON; a mapping is ``a=1,b=2`` or JSON; a choice is
    one of those that there are, whatever their types. Anything else stays text, and whoever validates it says so.

    Raises:
        ValueError: it looks like JSON and is none, or a pair has no ``=``.
    """
    kinds = members(annotation)
    if type(None) in kinds and text.strip().lower() in NOTHING:
        return None
    kinds = [kind for kind in kinds if kind is not type(None)]
    if any(kind is Any or kind in AS_THEY_STAND for kind in kinds):
        return text
    for kind in kinds:
        value = _as_kind(text, kind)
        if value is not text:
            return value
    return text


def members(annotation: Any) -> list[Any]:
    """The alternatives of a type: itself, or those of a union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in members(part)]
    return [annotation]


def _as_kind(text: str, kind: Any) -> Any:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return next((choice for choice in get_args(kind) if _written(choice) == text), text)
    if not isinstance(origin, type):
        return text
    if issubclass(origin, Enum):
        return next((choice for choice in origin if text in (str(choice.value), choice.name)), text)
    if issubclass(origin, BaseModel):
        return _json(text)
    if issubclass(origin, Mapping):
        return _mapping(text, (get_args(kind) or (Any, Any))[1])
    if issubclass(origin, Collection):
        return _collection(text, (get_args(kind) or (Any,))[0])
    return text


def _collection(text: str, inner: Any) -> Any:
    if text.strip().startswith("["):
        return _json(text)
    return [from_text(part.strip(), inner) for part in text.split(",") if part.strip()]


def _mapping(text: str, inner: Any) -> Any:
    if text.strip().startswith("{"):
        return _json(text)
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for key, equals, _ in pairs:
        if not equals:
            raise ValueError(f"{key.strip()!r} has no value: write NAME=VALUE,NAME=VALUE or JSON")
    return {key.strip(): from_text(value.strip(), inner) for key, _, value in pairs}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error


def _written(value: Any) -> str:
    """A value as people write it."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def kind_of(annotation: Any) -> str:
    """A type in words: ``int``, ``one of fcfs, priority``, ``int or none``, ``list of str``."""
    return " or ".join(dict.fromkeys(_kind_words(kind) for kind in members(annotation)))


def _kind_words(kind: Any) -> str:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is type(None):
        return "none"
    if origin is Literal:
        return "one of " + ", ".join(map(_written, inner))
    if not isinstance(origin, type):
        return str(kind).replace("typing.", "")
    if issubclass(origin, Enum):
        return "one of " + ", ".join(str(choice.value) for choice in origin)
    if issubclass(origin, (SecretStr, SecretBytes)):
        return "secret"
    if inner and issubclass(origin, Mapping):
        return f"name={kind_of(inner[1])},…"
    if inner and issubclass(origin, Collection):
        return f"list of {kind_of(inner[0])}"
    return "true or false" if origin is bool else origin.__name__


def bounds_of(field: FieldInfo) -> str:
    """The limits of a value in words, e.g. ``at least 0, below 1``; empty where there are none."""
    found = [f"{words} {getattr(limit, name):g}" for limit in field.metadata for name, words in BOUNDS
             if isinstance(getattr(limit, name, None), (int, float))]  # fmt: skip
    return ", ".join(found)


def hidden(name: str, value: Any) -> Any:
    """The value, or ``***`` where its name says that it is not for others to see."""
    return HIDDEN if value is not None and name.endswith(SECRET_NAMES) else value


def is_secret(name: str, field: FieldInfo) -> bool:
    """Whether a value is not for others to see: ``SecretStr``, or a name such as ``api_key``."""
    kinds = members(field.annotation)
    return any(kind in (SecretStr, SecretBytes) for kind in kinds) or name.endswith(SECRET_NAMES)


def as_toml(value: Any) -> str:
    """A plain value in TOML. ``None`` is the text ``none``, which ``from_text`` understands."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return '"none"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(str(key))} = {as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def readable(value: Any) -> str:
    """A plain value as it would be typed after a flag."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={readable(item)}" for key, item in value.items()) or "{}"
    if isinstance(value, (list, tuple)):
        return ",".join(map(readable, value)) or "[]"
    return _written(value)
