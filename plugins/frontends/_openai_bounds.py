"""The bounds of a request's fields, said in ``/openapi.json``. The validator is what enforces them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from engine.core.checks import MAX_INT, MAX_SALT
from engine.core.grammar_checks import MAX_CHOICES
from engine.core.protocols import Limits
from engine.core.validate import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SECONDS,
    MAX_SEED,
    MAX_TEMPERATURE,
)
from engine.plugins.frontends._openai_most import MOST_METADATA
from engine.plugins.frontends._openai_tools import MOST_TOOLS

COMPUTED = ("ChatRequest", "CompletionRequest", "ResponsesRequest", "EmbeddingRequest")
NUMBERS, ARRAYS, OBJECTS = ("integer", "number"), ("array",), ("object",)


def say_bounds(schemas: Mapping[str, dict[str, Any]], limits: Limits) -> None:
    """Add bounds to the schemas of bodies. Mutates."""
    _say_fields([schemas[name]["properties"] for name in COMPUTED], limits)
    for branch in _branches(schemas["StructuredOutputs"]["properties"]["choice"], ARRAYS):
        branch["maxItems"] = MAX_CHOICES
    for branch in _branches(schemas["ChatRequest"]["properties"]["max_tokens"], NUMBERS):
        branch["minimum"] = 1  # 0 is for completions that only echo
    token = {"type": "integer", **_token(limits)}
    longest = min(limits.max_model_len - 1, limits.pool_tokens)
    several = {"type": "array", "minItems": 1, "maxItems": limits.max_open}
    text, ids = {"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": token}
    prompt = {**ids, "maxItems": longest}
    shapes = [text, {**several, "items": text}, prompt, {**several, "items": prompt}]
    schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"] = shapes
    schemas["EmbeddingRequest"]["properties"]["input"]["anyOf"] = shapes
    schemas["DetokenizeRequest"]["properties"]["tokens"]["items"].update(_token(limits))
    explain = schemas["ExplainRequest"]["properties"]
    explain["prompt"] = {"anyOf": [text, ids]}
    explain["cache_salt"]["maxLength"] = MAX_SALT


def _say_fields(bodies: Iterable[dict[str, Any]], limits: Limits) -> None:
    numbers = _numbers(limits)
    arrays = {
        "stop": limits.max_stop_strings, "stop_token_ids": limits.max_stop_token_ids, "tools": MOST_TOOLS,
    }  # fmt: skip
    for fields in bodies:
        for field, bounds in numbers.items():
            for branch in _branches(fields.get(field, {}), NUMBERS):
                branch.update(bounds)
        for field, most in arrays.items():
            for branch in _branches(fields.get(field, {}), ARRAYS):
                branch["maxItems"] = most
        for branch in _branches(fields.get("stop_token_ids", {}), ARRAYS):
            branch["items"].update(_token(limits))
        for branch in _branches(fields.get("stop", {}), ARRAYS):
            branch["items"]["minLength"] = 1
        for branch in _branches(fields.get("stop", {}), ("string",)):
            branch["minLength"] = 1
        for branch in _branches(fields.get("logit_bias", {}), OBJECTS):
            branch["additionalProperties"].update({"minimum": -MAX_BIAS, "maximum": MAX_BIAS})
            branch["maxProperties"] = limits.max_logit_bias
            branch["propertyNames"] = {"pattern": "^[0-9]{1,20}$"}
        for branch in _branches(fields["metadata"], OBJECTS):
            branch["maxProperties"] = MOST_METADATA


def _token(limits: Limits) -> dict[str, Any]:
    return {"minimum": 0, "maximum": limits.vocab_size - 1}


def _numbers(limits: Limits) -> dict[str, dict[str, Any]]:
    penalty: dict[str, Any] = {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}
    wide = {"minimum": -MAX_SEED, "maximum": MAX_SEED - 1}
    length = {"minimum": 0, "maximum": limits.max_model_len - 1}
    rivals = {"minimum": 0, "maximum": limits.max_logprobs}
    return {
        "n": {"minimum": 1, "maximum": limits.max_n},
        "max_tokens": length,
        "max_completion_tokens": {**length, "minimum": 1},
        "max_output_tokens": {**length, "minimum": 1},
        "min_tokens": length,
        "temperature": {"minimum": 0, "maximum": MAX_TEMPERATURE},
        "top_p": {"exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"minimum": -1, "maximum": MAX_INT - 1},
        "min_p": {"minimum": 0, "maximum": 1},
        "repetition_penalty": {"exclusiveMinimum": 0, "maximum": MAX_REPETITION_PENALTY},
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "seed": wide,
        "priority": wide,
        "logprobs": rivals,
        "top_logprobs": rivals,
        "prompt_logprobs": rivals,
        "deadline_ms": {"minimum": 1, "maximum": int(MAX_SECONDS * 1000)},
    }


def _branches(schema: dict[str, Any], kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Those alternatives of a field's schema that are of one of these types."""
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") in kinds:
            yield branch
