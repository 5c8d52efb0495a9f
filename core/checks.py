"""Types and bounds of single values, and the words for what is wrong with them: what ``validate`` is made of."""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.errors import InvalidRequest

MAX_INT = 2**63  # what travels between processes
MAX_METADATA_DEPTH = 16
MAX_METADATA = 65_536  # values and characters together: every choice of a request carries it
MAX_SALT = 1024  # characters


def shown(value: float) -> str:
    """A number in a message; the longest would be refused by Python itself (more than 4300 digits)."""
    if not isinstance(value, int):
        return str(value)
    return str(value) if value.bit_length() <= 100 else f"an integer of {value.bit_length()} bits"


def kind(value: object) -> str:
    """A type as its user knows it: ``float``, ``numpy.int64``."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def check_int(field: str, value: object, least: int | None = None, most: int | None = None) -> None:
    """An ``int``, within bounds where they are given."""
    if type(value) is not int:
        raise InvalidRequest(field, f"must be an integer, not {kind(value)}")
    if (least is not None and value < least) or (most is not None and value > most):
        raise InvalidRequest(field, f"is {shown(value)}, must be between {least} and {most}")


def check_number(field: str, value: object, least: float, most: float) -> None:
    """An ``int`` or ``float`` between two bounds. NaN is not."""
    if type(value) is not float and type(value) is not int:
        raise InvalidRequest(field, f"must be a number, not {kind(value)}")
    if not least <= value <= most:
        raise InvalidRequest(field, f"is {shown(value)}, must be between {least:g} and {most:g}")


def check_bool(field: str, value: object) -> None:
    """``True`` or ``False``."""
    if type(value) is not bool:
        raise InvalidRequest(field, f"must be True or False, not {kind(value)}")


def check_sequence(field: str, value: object, of: str) -> None:
    """A tuple or list."""
    if not isinstance(value, tuple | list):
        raise InvalidRequest(field, f"must be a tuple of {of}, not {kind(value)}")


def check_text(field: str, value: object, most: int | None = None) -> None:
    """A ``str`` that has an encoding, of at most so many characters where that is given."""
    if type(value) is not str:
        raise InvalidRequest(field, f"must be a string, not {kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode: {error.reason}") from error
    if most is not None and len(value) > most:
        words = f"has {len(value)} characters, at most {most} are allowed"
        raise InvalidRequest(field, words, code="above_limit")


def check_metadata(metadata: Mapping[str, object]) -> None:
    """Plain values by name, not too many and not too long."""
    if (size := check_plain("metadata", dict(metadata))) > MAX_METADATA:
        words = f"has {size} values and characters together, at most {MAX_METADATA} are allowed"
        raise InvalidRequest("metadata", words, code="above_limit")


def check_plain(where: str, value: object, depth: int = MAX_METADATA_DEPTH) -> int:
    """Text, numbers, booleans, ``None``, lists and dictionaries of them: part of ``metadata``. Returns its size."""
    if depth == 0:
        raise InvalidRequest("metadata", f"is nested more than {MAX_METADATA_DEPTH} deep")
    size = 1
    if type(value) is str:
        check_text("metadata", value)
        size += len(value)
    elif type(value) is int:
        if not -MAX_INT <= value < MAX_INT:
            raise InvalidRequest("metadata", f"{where} is {shown(value)}, must fit in 64 bits")
    elif type(value) is dict:
        for key, inner in value.items():
            check_text("metadata", key)
            size += len(key) + check_plain(f"{where}[{key!r:.80}]", inner, depth - 1)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            size += check_plain(f"{where}[{number}]", inner, depth - 1)
    elif value is not None and type(value) is not bool and type(value) is not float:
        raise InvalidRequest("metadata", f"{where} is a {kind(value)}: only plain values can travel to the engine")
    return size
