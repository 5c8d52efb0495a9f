"""How much there is in a JSON text, found without building it: a body of few bytes can be millions of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import InitErrorDetails, PydanticCustomError

from engine.core.errors import InvalidRequest

MOST_PARTS = 16_384
STRINGS_A_PART = 8
PIECE = 256 * 1024  # bytes that are looked at in one go, for nothing else runs in this process meanwhile
AT_ONCE = 256  # items of a list that are checked in one go, for nothing else runs in this process meanwhile


class Most(NamedTuple):
    """How much a JSON text may hold at most; ``None``: any number.

    Attributes:
        parts: lists and objects.
        strings: names of fields, too.
        elements: of lists and objects together.
        text: bytes of strings, as they are written, with their quotes.
        option: what it follows from, for messages.
    """

    parts: int | None = None
    strings: int | None = None
    elements: int | None = None
    text: int | None = None
    option: str = ""

    @classmethod
    def body(cls, parts: int, elements: int | None = None) -> Most:
        """Of a whole body: ``STRINGS_A_PART`` times as many strings as lists and objects."""
        return cls(parts, parts * STRINGS_A_PART, elements)


def check_parts(text: bytes, most: Most, field: str = "body") -> None:
    """Raise ``InvalidRequest`` at the field whose JSON text has more in it than it may have.

    Builds no value of it. Whether it is JSON at all is for others to say: what is none may seem to hold more.
    """
    if _within(text, most):  # also of what stands in strings: no text has fewer
        return
    quotes = parts = commas = plain = 0
    for outside, found in _outside(text):
        quotes, plain = quotes + found, plain + len(outside)
        parts, commas = parts + outside.count(b"[") + outside.count(b"{"), commas + outside.count(b",")
    for count, bound, of in (
        (quotes // 2, most.strings, "strings"),
        (parts, most.parts, "lists and objects"),
        (_elements(commas), most.elements, "elements"),
        (len(text) - plain, most.text, "bytes of text"),
    ):
        if bound is not None and count > bound:
            words = f"has {count} {of}, at most {bound} are allowed" + (f" ({most.option})" if most.option else "")
            raise InvalidRequest(field, words, code="above_limit")


def _within(text: bytes, most: Most) -> bool:
    """Whether it certainly holds no more: the usual case, at the speed of memory."""
    return (
        (most.text is None or len(text) <= most.text)
        and (most.parts is None or _count(text, b"[") + _count(text, b"{") <= most.parts)
        and (most.strings is None or _count(text, b'"') <= 2 * most.strings)
        and (most.elements is None or _elements(_count(text, b",")) <= most.elements)
    )


def _count(text: bytes, mark: bytes) -> int:
    return sum(text.count(mark, at, at + PIECE) for at in range(0, len(text), PIECE))


def _elements(commas: int) -> int:
    """Of a list that has so many; one alone is no more than none."""
    return commas + 1 if commas else 0


def _outside(text: bytes) -> Iterator[tuple[bytes, int]]:
    """Piece by piece, what stands outside of strings, and how many quotes begin or end a string."""
    inside, rest = False, b""
    for at in range(0, len(text), PIECE):
        plain = (rest + text[at : at + PIECE]).replace(rb"\\", b"")
        rest = plain[len(plain.removesuffix(b"\\")) :]  # it is of a pair with what comes next
        texts = plain.removesuffix(b"\\").replace(rb"\"", b"").split(b'"')
        yield b"".join(texts[inside::2]), len(texts) - 1
        inside ^= len(texts) % 2 == 0


def _in_slices(value: Any, check: Callable[[Any], list[Any]]) -> list[Any]:
    """Check a long list a few items at a time. The first item with a fault is the last one."""
    if not isinstance(value, list) or len(value) <= AT_ONCE:
        return check(value)
    found: list[Any] = []
    for start in range(0, len(value), AT_ONCE):
        some = value[start : start + AT_ONCE]
        try:
            found += check(some)
        except ValidationError:
            _check_each(some, start, check)
            raise
    return found


def _check_each(items: list[Any], start: int, check: Callable[[Any], list[Any]]) -> None:
    """Raise the faults of the first of these that has some, alone: those of all together would be thousands."""
    for place, item in enumerate(items, start):
        try:
            check([item])
        except ValidationError as error:
            raise _moved(error, place) from None


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
