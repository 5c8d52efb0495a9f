"""The one validator: HTTP, the Python API and the core itself all refuse the same requests with the same words.

Types are checked exactly: what is not a plain ``int`` or ``str`` (a numpy integer, a string where strings are wanted)
would be taken one way in this process and another way, or not at all, in the engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from engine.core.errors import InvalidRequest
from engine.core.identity import pack, surely_below
from engine.core.protocols import Limits
from engine.core.request import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_SEED = 2**63
MAX_INT = 2**63  # what travels between processes
MAX_METADATA_DEPTH = 16


class Valid(NamedTuple):
    """What a check of a request found out."""

    max_total: int  # most tokens (prompt and output) that it may come to
    packed: bytes  # its prompt, see ``Request.packed``


def validate(tokens: Sequence[int], params: SamplingParams, limits: Limits) -> Valid:
    """Check a request against the limits.

    A prompt must leave room for at least one output token: ``len(prompt) <= max_model_len - 1``. A request whose prompt
    alone does not fit into the KV pool can never run and is refused; one that could outgrow the pool while running
    alone is accepted and would end with reason ``length`` and detail ``kv_capacity``.

    Raises:
        InvalidRequest: names the field, its value and the limit, or the type that it should have.
    """
    packed = _check_prompt(tokens, limits)
    if not isinstance(params, SamplingParams):
        raise InvalidRequest("params", f"must be SamplingParams, not {_kind(params)}")
    room = limits.max_model_len - len(tokens)
    _check_lengths(params, room, len(tokens), limits)
    _check_sampling(params)
    _check_stops(params, limits)
    return Valid(len(tokens) + (room if params.max_tokens is None else params.max_tokens), packed)


def check_fields(
    *,
    request_id: str | None = None,
    priority: int = 0,
    salt: str = "",
    adapter: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Check what a request carries besides its prompt and sampling parameters. ``metadata`` holds plain values only
    (text, numbers, booleans, ``None``, lists and dictionaries of them), because it travels to the engine's process.

    Raises:
        InvalidRequest: names the field and the type or range that it should have.
    """
    if request_id is not None:
        _check_text("request_id", request_id)
    _check_int("priority", priority)
    if not -MAX_INT <= priority < MAX_INT:
        raise InvalidRequest("priority", f"is {_shown(priority)}, must fit in 64 bits")
    _check_text("salt", salt)
    _check_text("adapter", adapter)
    if metadata is None:
        return
    if not isinstance(metadata, Mapping):
        raise InvalidRequest("metadata", f"must be a mapping, not {_kind(metadata)}")
    _check_plain("metadata", dict(metadata), MAX_METADATA_DEPTH)


def _check_prompt(tokens: Sequence[int], limits: Limits) -> bytes:
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes | bytearray):
        raise InvalidRequest("prompt", f"must be a list of token ids, not {_kind(tokens)}")
    if not len(tokens):
        raise InvalidRequest("prompt", "is empty: at least one token is needed")
    if len(tokens) > limits.max_model_len - 1:
        raise InvalidRequest(
            "prompt",
            f"has {len(tokens)} tokens; at most {limits.max_model_len - 1} leave room for an output token "
            f"(limit of {limits.max_model_len} tokens)",
        )
    if len(tokens) > limits.pool_tokens:
        raise InvalidRequest(
            "prompt",
            f"has {len(tokens)} tokens, but the whole KV pool holds {limits.pool_tokens} "
            f"({limits.num_pages} pages of {limits.page_size})",
        )
    return _check_token_ids("prompt", tokens, limits)


def _check_token_ids(field: str, tokens: Sequence[int], limits: Limits) -> bytes:
    # The usual case at the speed of the interpreter's own loops: long prompts are checked twice, here and at home.
    if list(map(type, tokens)).count(int) == len(tokens):
        with suppress(OverflowError):  # it is below 0 or beyond 32 bits
            packed = pack(tokens)
            if surely_below(packed, limits.vocab_size) or max(tokens) < limits.vocab_size:
                return packed
    for token in tokens:
        if type(token) is not int:
            raise InvalidRequest(field, f"token ids are integers, not {_kind(token)}")
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequest(
                field, f"token id {_shown(token)} is outside the vocabulary (0 … {limits.vocab_size - 1})"
            )
    return pack(tokens)


def _check_lengths(params: SamplingParams, room: int, num_prompt: int, limits: Limits) -> None:
    most = params.max_tokens
    if most is not None:
        _check_int("max_tokens", most)
        if most < 1:
            raise InvalidRequest("max_tokens", f"is {_shown(most)}, must be at least 1")
        if most > room:
            raise InvalidRequest(
                "max_tokens",
                f"{num_prompt} prompt tokens + max_tokens {_shown(most)} = {_shown(num_prompt + most)} "
                f"is above the limit of {limits.max_model_len} tokens: at most {room} fit",
            )
    _check_int("min_tokens", params.min_tokens)
    if not 0 <= params.min_tokens <= (room if most is None else most):
        bound = f"{room}, all the room that the prompt leaves" if most is None else f"max_tokens, which is {most}"
        raise InvalidRequest("min_tokens", f"is {_shown(params.min_tokens)}, must be between 0 and {bound}")


def _check_sampling(params: SamplingParams) -> None:
    _check_number("temperature", params.temperature)
    if not 0 <= params.temperature <= 100:  # NaN is not
        raise InvalidRequest("temperature", f"is {_number(params.temperature)}, must be between 0 and 100")
    _check_number("top_p", params.top_p)
    if not 0 < params.top_p <= 1:
        raise InvalidRequest("top_p", f"is {_number(params.top_p)}, must be above 0 and at most 1")
    _check_int("top_k", params.top_k)
    if not 0 <= params.top_k < MAX_INT:
        raise InvalidRequest("top_k", f"is {_shown(params.top_k)}, must be 0 (off) or more, and fit in 64 bits")
    if params.seed is not None:
        _check_int("seed", params.seed)
        if not -MAX_SEED <= params.seed < MAX_SEED:
            raise InvalidRequest("seed", f"is {_shown(params.seed)}, must fit in 64 bits")
    if type(params.ignore_eos) is not bool:
        raise InvalidRequest("ignore_eos", f"must be True or False, not {_kind(params.ignore_eos)}")


def _check_stops(params: SamplingParams, limits: Limits) -> None:
    if isinstance(params.stop, str):
        raise InvalidRequest("stop", "must be a tuple of strings, not one string: write ('…',)")
    _check_sequence("stop", params.stop, "strings")
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"has {len(params.stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
    for text in params.stop:
        _check_text("stop", text)
        if not text:
            raise InvalidRequest("stop", "an empty stop string would end every text at once")
        if len(text) > MAX_STOP_LENGTH:
            raise InvalidRequest("stop", f"a stop string has {len(text)} characters, at most {MAX_STOP_LENGTH}")
    _check_sequence("stop_token_ids", params.stop_token_ids, "token ids")
    _check_token_ids("stop_token_ids", params.stop_token_ids, limits)


# ---- types and words


def _shown(value: int) -> str:
    """An integer in a message; the longest would be refused by Python itself (more than 4300 digits)."""
    return str(value) if value.bit_length() <= 100 else f"an integer of {value.bit_length()} bits"


def _kind(value: object) -> str:
    """A type as its user knows it: ``float``, ``numpy.int64``."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _number(value: float) -> str:
    return _shown(value) if isinstance(value, int) else str(value)


def _check_int(field: str, value: object) -> None:
    if type(value) is not int:
        raise InvalidRequest(field, f"must be an integer, not {_kind(value)}")


def _check_number(field: str, value: object) -> None:
    if type(value) is not float and type(value) is not int:
        raise InvalidRequest(field, f"must be a number, not {_kind(value)}")


def _check_sequence(field: str, value: object, of: str) -> None:
    if not isinstance(value, tuple | list):
        raise InvalidRequest(field, f"must be a tuple of {of}, not {_kind(value)}")


def _check_text(field: str, value: object) -> None:
    if type(value) is not str:
        raise InvalidRequest(field, f"must be a string, not {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode: {error.reason}") from error


def _check_plain(where: str, value: object, depth: int) -> None:
    if depth == 0:
        raise InvalidRequest("metadata", f"is nested more than {MAX_METADATA_DEPTH} deep")
    if type(value) is str:
        _check_text("metadata", value)
    elif type(value) is int:
        if not -MAX_INT <= value < MAX_INT:
            raise InvalidRequest("metadata", f"{where} is {_shown(value)}, must fit in 64 bits")
    elif type(value) is dict:
        for key, inner in value.items():
            _check_text("metadata", key)
            _check_plain(f"{where}[{key!r}]", inner, depth - 1)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            _check_plain(f"{where}[{number}]", inner, depth - 1)
    elif value is not None and type(value) is not bool and type(value) is not float:
        raise InvalidRequest("metadata", f"{where} is a {_kind(value)}: only plain values can travel to the engine")
