"""The one validator: HTTP, the Python API and the core itself all refuse the same requests with the same words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.core.errors import InvalidRequest
from engine.core.protocols import Limits
from engine.core.request import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_SEED = 2**63


def validate(tokens: Sequence[int], params: SamplingParams, limits: Limits) -> int:
    """Check a request against the limits. Returns the most tokens (prompt and output) that it may come to.

    A prompt must leave room for at least one output token: ``len(prompt) <= max_model_len - 1``. A request whose prompt
    alone does not fit into the KV pool can never run and is refused; one that could outgrow the pool while running
    alone is accepted and would end with reason ``length`` and detail ``kv_capacity``.

    Raises:
        InvalidRequest: names the field, its value and the limit.
    """
    _check_prompt(tokens, limits)
    _check_params(params, limits)
    room = limits.max_model_len - len(tokens)
    if params.max_tokens is not None and params.max_tokens > room:
        raise InvalidRequest(
            "max_tokens",
            f"{len(tokens)} prompt tokens + max_tokens {params.max_tokens} = {len(tokens) + params.max_tokens} "
            f"is above the limit of {limits.max_model_len} tokens: at most {room} fit",
        )
    return len(tokens) + (room if params.max_tokens is None else params.max_tokens)


def _check_prompt(tokens: Sequence[int], limits: Limits) -> None:
    if not tokens:
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
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidRequest("prompt", f"token ids are integers, not {type(token).__name__}")
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequest("prompt", f"token id {token} is outside the vocabulary (0 … {limits.vocab_size - 1})")


def _check_params(params: SamplingParams, limits: Limits) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequest("max_tokens", f"is {params.max_tokens}, must be at least 1")
    if params.min_tokens < 0 or (params.max_tokens is not None and params.min_tokens > params.max_tokens):
        raise InvalidRequest("min_tokens", f"is {params.min_tokens}, must be between 0 and max_tokens")
    if not math.isfinite(params.temperature) or not 0 <= params.temperature <= 100:
        raise InvalidRequest("temperature", f"is {params.temperature}, must be between 0 and 100")
    if not 0 < params.top_p <= 1:
        raise InvalidRequest("top_p", f"is {params.top_p}, must be above 0 and at most 1")
    if params.top_k < 0:
        raise InvalidRequest("top_k", f"is {params.top_k}, must be 0 (off) or more")
    if params.seed is not None and not -MAX_SEED <= params.seed < MAX_SEED:
        raise InvalidRequest("seed", f"is {params.seed}, must fit in 64 bits")
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"has {len(params.stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
    for text in params.stop:
        if not text:
            raise InvalidRequest("stop", "an empty stop string would end every text at once")
        if len(text) > MAX_STOP_LENGTH:
            raise InvalidRequest("stop", f"a stop string has {len(text)} characters, at most {MAX_STOP_LENGTH}")
    for token in params.stop_token_ids:
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequest(
                "stop_token_ids", f"token id {token} is outside the vocabulary (0 … {limits.vocab_size - 1})"
            )
