"""A JSON body read field by field: what a field's text says is counted before anything of it is built, and long lists
are built a piece at a time, for nothing else runs in this process while a call builds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NoReturn

import msgspec

from engine.core.checks import MAX_INT
from engine.core.errors import InvalidRequest
from engine.plugins.frontends._bounds import PIECE

MISSING, UNKNOWN = "missing", "unknown_field"
INFINITY = float("inf")
ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
LEVELS = 3  # of lists in lists that are built in pieces
NAMES = {"array": "a list", "null": "null", "str": "a string", "bool": "a boolean", "int": "a number",
         "float": "a number"}  # fmt: skip


class UnknownField(Exception):
    """A body has a field of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def fields_of(body: bytes, names: Collection[str]) -> dict[str, bytes]:
    """The JSON text of each field that an object has, of those that it may have; of two of one name the last one.

    Strings in it may still turn out not to be Unicode, and numbers to be too large.

    Raises:
        InvalidRequest: it is no JSON object.
        UnknownField: it has another one.
    """
    if not body.strip():
        raise InvalidRequest("body", "is empty: send a JSON object", code=MISSING)
    try:
        fields = msgspec.json.decode(body, type=_kind(frozenset(names)))
    except msgspec.ValidationError as error:
        _refuse(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(error) from error
    return {name: text for name in fields.__struct_fields__ if (text := bytes(getattr(fields, name)))}


@cache
def _kind(names: frozenset[str]) -> type[msgspec.Struct]:
    """An object with these fields, none of which is built."""
    fields: list[tuple[str, Any, Any]] = [(name, msgspec.Raw, msgspec.Raw()) for name in sorted(names)]
    return msgspec.defstruct("Body", fields, forbid_unknown_fields=True)


def _refuse(words: str) -> NoReturn:
    """What msgspec says of a body that is JSON but not such an object."""
    said, _, rest = words.partition("`")
    if "unknown field" in said:
        raise UnknownField(rest[:-1])
    kind = rest.rpartition("got ")[2].strip("`")
    raise InvalidRequest("body", f"must be a JSON object, not {NAMES.get(kind, kind)}")


def value_of(text: bytes, *, as_written: bool = False) -> Any:
    """The value of a field's text, which ``fields_of`` has found. Raises ``InvalidRequest``.

    Args:
        as_written: 1.0 stays what it is. Else it is the integer 1, as JSON Schema has it.
    """
    try:
        return _built(text, LEVELS, (PLAIN if as_written else WHOLE).decode)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(error) from error


def _malformed(error: Exception) -> InvalidRequest:
    return InvalidRequest("body", f"is not valid JSON: {error}")


def _number(text: str) -> float:
    value = float(text)
    if value in (INFINITY, -INFINITY):
        raise msgspec.ValidationError("Number out of range")
    return int(value) if abs(value) < MAX_INT and value.is_integer() else value


PLAIN, WHOLE = msgspec.json.Decoder(), msgspec.json.Decoder(float_hook=_number)
Decode = Callable[[bytes], Any]


def _built(text: bytes, levels: int, decode: Decode) -> Any:
    if len(text) <= PIECE or not levels or text[:1] != b"[":
        return decode(text)
    if text.count(b"[") == 1 and not (b"{" in text or b'"' in text):
        return _flat(text, decode)
    return [_built(bytes(item), levels - 1, decode) for item in ITEMS.decode(text)]


def _flat(text: bytes, decode: Decode) -> list[Any]:
    """A list of numbers and the like."""
    found: list[Any] = []
    at, end = 1, len(text) - 1
    while at < end:
        to = text.find(b",", at + PIECE)
        to = end if to < 0 else to
        found += decode(b"[" + text[at:to] + b"]")
        at = to + 1
    return found
