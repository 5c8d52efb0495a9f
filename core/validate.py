"""The one validator: HTTP, the Python API and the core itself all refuse the same requests with the same words.

Types are checked exactly: what is not a plain ``int`` or ``str`` (a numpy integer, a string where strings are wanted)
would be taken one way in this process and another way, or not at all, in the engine's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from engine.core.checks import (
    MAX_INT,
    MAX_SALT,
    check_bool,
    check_int,
    check_metadata,
    check_number,
    check_sequence,
    check_text,
    kind,
)
from engine.core.checks import shown as _shown
from engine.core.errors import InvalidRequest
from engine.core.grammar_checks import check_grammar
from engine.core.identity import pack, surely_below
from engine.core.pooling import Pooling, check_pooling
from engine.core.protocols import Limits
from engine.core.sampling import SamplingParams

MAX_SEED = 2**63
MAX_TEMPERATURE = 100
MAX_PENALTY = 2
MAX_REPETITION_PENALTY = 10
MAX_BIAS = 100
MAX_SECONDS = 1e9


class Valid(NamedTuple):
    """What a check of a request found out."""

    max_total: int  # most tokens (prompt and output) that it may come to
    packed: bytes  # its prompt, see ``Request.packed``


def validate(tokens: Sequence[int], params: SamplingParams, limits: Limits, pooling: Pooling | None = None) -> Valid:
    """Check a request against the limits.

    A prompt must leave room for at least one output token: ``len(prompt) <= max_model_len - 1``. A request whose prompt
    alone does not fit into the KV pool can never run and is refused; one that could outgrow the pool while running
    alone is accepted and would end with reason ``length`` and detail ``kv_capacity``. With ``pooling`` there is no
    output; sampling parameters would mean nothing and are refused.

    Raises:
        InvalidRequest: names the field, its value and the limit, or the type that it should have.
    """
    packed = _check_prompt(tokens, limits)
    if not isinstance(params, SamplingParams):
        raise InvalidRequest("params", f"must be SamplingParams, not {kind(params)}")
    if pooling is not None:
        check_pooling(pooling, limits.pooling)
        if params != SamplingParams():
            raise InvalidRequest("params", "a request with pooling samples nothing: leave them out")
        return Valid(len(tokens), packed)
    room = limits.max_model_len - len(tokens)
    _check_lengths(params, room, len(tokens), limits)
    _check_sampling(params)
    _check_choices(params, limits)
    _check_stops(params, limits)
    _check_logprobs(params, len(tokens), limits)
    _check_logit_bias(params.logit_bias, limits)
    if params.grammar is not None:
        check_grammar(params.grammar, params, limits)
    for name in params.used:
        if name not in limits.sampling:
            raise InvalidRequest(name, "is not supported by the executor that serves here", code="unsupported")
    return Valid(len(tokens) + (room if params.max_tokens is None else params.max_tokens), packed)


def can_read_cache(params: Any, pooling: Any) -> bool:
    """Whether a cached prefix is of use to a request: not where it wants something of every position. Also of what was
    not validated."""
    return getattr(params, "prompt_logprobs", None) is None and getattr(pooling, "reads_cache", True) is not False


def check_fields(
    *,
    request_id: str | None = None,
    priority: int = 0,
    salt: str = "",
    adapter: str = "",
    metadata: Mapping[str, Any] | None = None,
    read_cache: bool = True,
    write_cache: bool = True,
    cache_ttl: float | None = None,
    deadline: float | None = None,
) -> None:
    """Check what a request carries besides its prompt and sampling parameters. ``metadata`` holds plain values only
    (text, numbers, booleans, ``None``, lists and dictionaries of them), because it travels to the engine's process, and
    at most ``MAX_METADATA`` of them and their characters together.

    Raises:
        InvalidRequest: names the field and the type or range that it should have.
    """
    if request_id is not None:
        check_text("request_id", request_id)
    check_int("priority", priority)
    if not -MAX_INT <= priority < MAX_INT:
        raise InvalidRequest("priority", f"is {_shown(priority)}, must fit in 64 bits")
    check_text("salt", salt, MAX_SALT)
    check_text("adapter", adapter)
    check_bool("read_cache", read_cache)
    check_bool("write_cache", write_cache)
    if cache_ttl is not None:
        _check_above_0("cache_ttl", cache_ttl, MAX_SECONDS)
        if not write_cache:
            raise InvalidRequest("cache_ttl", "is for what others find, and write_cache lets them find nothing")
    if deadline is not None:
        check_number("deadline", deadline, 0, MAX_SECONDS)
    if metadata is None:
        return
    if not isinstance(metadata, Mapping):
        raise InvalidRequest("metadata", f"must be a mapping, not {kind(metadata)}")
    check_metadata(metadata)


def _check_prompt(tokens: Sequence[int], limits: Limits) -> bytes:
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes | bytearray):
        raise InvalidRequest("prompt", f"must be a list of token ids, not {kind(tokens)}")
    if not len(tokens):
        raise InvalidRequest("prompt", "is empty: at least one token is needed")
    if len(tokens) > limits.max_model_len - 1:
        raise InvalidRequest(
            "prompt",
            f"has {len(tokens)} tokens; at most {limits.max_model_len - 1} leave room for an output token "
            f"(limit of {limits.max_model_len} tokens)",
            code="above_limit",
        )
    if len(tokens) > limits.pool_tokens:
        raise InvalidRequest(
            "prompt",
            f"has {len(tokens)} tokens, but the whole KV pool holds {limits.pool_tokens} "
            f"({limits.num_pages} pages of {limits.page_size})",
            code="above_limit",
        )
    return check_token_ids("prompt", tokens, limits)


def check_token_ids(field: str, tokens: Sequence[int], limits: Limits) -> bytes:
    """Token ids of the model, packed. Raises ``InvalidRequest``."""
    # The usual case at the speed of the interpreter's own loops: long prompts are checked twice, here and at home.
    if list(map(type, tokens)).count(int) == len(tokens):
        with suppress(OverflowError):  # it is below 0 or beyond 32 bits
            packed = pack(tokens)
            if surely_below(packed, limits.vocab_size) or max(tokens) < limits.vocab_size:
                return packed
    for token in tokens:
        if type(token) is not int:
            raise InvalidRequest(field, f"token ids are integers, not {kind(token)}")
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequest(
                field, f"token id {_shown(token)} is outside the vocabulary (0 … {limits.vocab_size - 1})"
            )
    return pack(tokens)


def _check_lengths(params: SamplingParams, room: int, num_prompt: int, limits: Limits) -> None:
    most = params.max_tokens
    if most is not None:
        check_int("max_tokens", most)
        if most < 1:
            raise InvalidRequest("max_tokens", f"is {_shown(most)}, must be at least 1")
        if most > room:
            raise InvalidRequest(
                "max_tokens",
                f"{num_prompt} prompt tokens + max_tokens {_shown(most)} = {_shown(num_prompt + most)} "
                f"is above the limit of {limits.max_model_len} tokens: at most {room} fit",
                code="above_limit",
            )
    check_int("min_tokens", params.min_tokens)
    if not 0 <= params.min_tokens <= (room if most is None else most):
        bound = f"{room}, all the room that the prompt leaves" if most is None else f"max_tokens, which is {most}"
        raise InvalidRequest("min_tokens", f"is {_shown(params.min_tokens)}, must be between 0 and {bound}")


def _check_sampling(params: SamplingParams) -> None:
    check_number("temperature", params.temperature, 0, MAX_TEMPERATURE)
    _check_above_0("top_p", params.top_p, 1)
    check_int("top_k", params.top_k)
    if not 0 <= params.top_k < MAX_INT:
        raise InvalidRequest("top_k", f"is {_shown(params.top_k)}, must be 0 (off) or more, and fit in 64 bits")
    check_number("min_p", params.min_p, 0, 1)
    _check_above_0("repetition_penalty", params.repetition_penalty, MAX_REPETITION_PENALTY)
    check_number("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    check_number("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if params.seed is not None:
        check_int("seed", params.seed)
        if not -MAX_SEED <= params.seed < MAX_SEED:
            raise InvalidRequest("seed", f"is {_shown(params.seed)}, must fit in 64 bits")
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
        check_bool(name, getattr(params, name))


def _check_above_0(field: str, value: float, most: float) -> None:
    check_number(field, value, -MAX_SECONDS, MAX_SECONDS)
    if not 0 < value <= most:
        raise InvalidRequest(field, f"is {_shown(value)}, must be above 0 and at most {most:g}")


def _check_choices(params: SamplingParams, limits: Limits) -> None:
    check_int("n", params.n)
    if not 1 <= params.n <= limits.max_n:
        raise InvalidRequest("n", f"is {_shown(params.n)}, must be between 1 and {limits.max_n}", code="above_limit")
    check_int("choice", params.choice, 0, MAX_INT - 1)


def _check_stops(params: SamplingParams, limits: Limits) -> None:
    if isinstance(params.stop, str):
        raise InvalidRequest("stop", "must be a tuple of strings, not one string: write ('…',)")
    check_sequence("stop", params.stop, "strings")
    _check_many("stop", params.stop, "strings", limits.max_stop_strings)
    for text in params.stop:
        check_text("stop", text)
        if not text:
            raise InvalidRequest("stop", "an empty stop string would end every text at once")
        if len(text) > limits.max_stop_length:
            words = f"a stop string has {len(text)} characters, at most {limits.max_stop_length} are allowed"
            raise InvalidRequest("stop", words, code="above_limit")
    check_sequence("stop_token_ids", params.stop_token_ids, "token ids")
    _check_many("stop_token_ids", params.stop_token_ids, "token ids", limits.max_stop_token_ids)
    check_token_ids("stop_token_ids", params.stop_token_ids, limits)


def _check_many(field: str, values: Sequence[Any] | Mapping[Any, Any], of: str, most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(field, f"has {len(values)} {of}, at most {most} are allowed", code="above_limit")


def _check_logprobs(params: SamplingParams, num_prompt: int, limits: Limits) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None:
            check_int(name, count)
            if not 0 <= count <= limits.max_logprobs:
                words = f"is {_shown(count)}, must be between 0 and {limits.max_logprobs}"
                raise InvalidRequest(name, words, code="above_limit")
    if params.prompt_logprobs is not None:
        entries = num_prompt * (params.prompt_logprobs + 1) * params.n
        if entries > limits.max_prompt_logprobs:
            words = (
                f"{num_prompt} prompt tokens x ({params.prompt_logprobs} + 1) x n {params.n} = {entries} "
                f"log-probabilities, at most {limits.max_prompt_logprobs} are allowed"
            )
            raise InvalidRequest("prompt_logprobs", words, code="above_limit")


def _check_logit_bias(bias: Mapping[int, float], limits: Limits) -> None:
    if type(bias) is not dict:
        raise InvalidRequest("logit_bias", f"must be a dictionary of token ids and numbers, not {kind(bias)}")
    if bias:
        _check_many("logit_bias", bias, "entries", limits.max_logit_bias)
        check_token_ids("logit_bias", list(bias), limits)
        for value in bias.values():
            check_number("logit_bias", value, -MAX_BIAS, MAX_BIAS)
