"""How much there is in a JSON text, found without building it: a body of few bytes can be millions of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import InitErrorDetails, PydanticCustomError

from engine.core.errors import InvalidRequest

MOST_PARTS = 16_384
STRINGS_A_PART = 8
PIECE = 256 * 1024  # bytes that are looked at in one go, for nothing else runs in this process meanwhile
AT_ONCE = 256  # items of a list that are checked in one go, for nothing else runs in this process meanwhile


def check_parts(body: bytes, most: int, elements: int | None = None) -> None:
    """Raise ``InvalidRequest`` where a body has more objects and lists than ``most``, more strings than
    ``STRINGS_A_PART`` times as many, or more ``elements`` (of lists and objects together).

    Builds no value of it. Whether it is JSON at all is for others to say.
    """
    strings = most * STRINGS_A_PART
    if _within(body, most, strings, elements):  # also of what stands in strings: no text has fewer
        return
    quotes = parts = commas = 0
    for outside, found in _outside(body):
        quotes, parts, commas = quotes + found, parts + _parts(outside), commas + outside.count(b",")
    for count, bound, of in (
        (quotes // 2, strings, "strings"),
        (parts, most, "lists and objects"),
        (commas, elements, "elements"),
    ):
        if bound is not None and count > bound:
            raise _too_much(count, bound, of)


def _within(body: bytes, most: int, strings: int, elements: int | None) -> bool:
    return (
        _parts(body) <= most and body.count(b'"') <= 2 * strings and (elements is None or body.count(b",") <= elements)
    )


def _outside(body: bytes) -> Iterator[tuple[bytes, int]]:
    """Piece by piece, what stands outside of strings, and how many quotes begin or end a string."""
    inside, rest = False, b""
    for at in range(0, len(body), PIECE):
        plain = (rest + body[at : at + PIECE]).replace(rb"\\", b"")
        rest = plain[len(plain.removesuffix(b"\\")) :]  # it is of a pair with what comes next
        texts = plain.removesuffix(b"\\").replace(rb"\"", b"").split(b'"')
        yield b"".join(texts[inside::2]), len(texts) - 1
        inside ^= len(texts) % 2 == 0


def _parts(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _too_much(found: int, most: int, of: str) -> InvalidRequest:
    return InvalidRequest("body", f"has {found} {of}, at most {most} are allowed", code="above_limit")


def _in_slices(value: Any, check: Callable[[Any], list[Any]]) -> list[Any]:
    """Check a long list a few items at a time. The first slice with a fault is the last one."""
    if not isinstance(value, list) or len(value) <= AT_ONCE:
        return check(value)
    found: list[Any] = []
    for start in range(0, len(value), AT_ONCE):
        try:
            found += check(value[start : start + AT_ONCE])
        except ValidationError as error:
            raise _moved(error, start) from None
    return found


def _moved(error: ValidationError, by: int) -> ValidationError:
    """The same faults of a slice that begins there in the list."""
    lines: list[InitErrorDetails] = []
    for one in error.errors(include_url=False):
        first, *rest = one["loc"]
        assert isinstance(first, int)
        kind = PydanticCustomError(one["type"], one["msg"])
        lines.append(InitErrorDetails(type=kind, loc=(first + by, *rest), input=one["input"]))
    return ValidationError.from_exception_data(error.title, lines)


def _in_parts(value: Any, check: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Check a large object a few fields at a time. The first part with a fault is the last one."""
    if not isinstance(value, dict) or len(value) <= AT_ONCE:
        return check(value)
    found: dict[str, Any] = {}
    fields = iter(value.items())
    while part := dict(islice(fields, AT_ONCE)):
        found |= check(part)
    return found


InParts = WrapValidator(_in_parts)
"""Of an object with names that clients choose."""

InSlices = WrapValidator(_in_slices)
"""Of a list of objects in a body."""


def _off(value: bool) -> bool:
    if value:
        raise PydanticCustomError("not_off", "input should be False")
    return value


Off = Annotated[bool, AfterValidator(_off), WithJsonSchema({"const": False, "type": "boolean"})]
"""A switch that must be off. (``Literal[False]`` would take 0, too.)"""
