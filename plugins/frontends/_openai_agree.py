"""Which fields of a body go together and which do not, said in ``/openapi.json`` as far as JSON Schema can. What is
enforced stands where the fields are read; tests hold the two together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NULL: dict[str, Any] = {"type": "null"}
GIVEN: dict[str, Any] = {"not": NULL}
TRUE: dict[str, Any] = {"const": True}

Schema = dict[str, Any]


def say_agreements(schemas: Mapping[str, Schema], hidden_size: int) -> None:
    """Add them to the schemas of bodies. Mutates.

    Args:
        hidden_size: how many numbers an embedding has.
    """
    schemas["TokenizeRequest"]["oneOf"] = [_has("prompt"), _has("messages")]
    schemas["StructuredOutputs"]["oneOf"] = [
        _has("json"), _has("regex"), _has("choice"), _has("grammar"), {**_where(json_object=TRUE)}
    ]  # fmt: skip
    schemas["Message"]["oneOf"] = _messages()
    _also(schemas["ResponseFormat"], _one_if_other({"type": {"const": "json_schema"}}, "json_schema"))
    _also(schemas["CacheOptions"], _never(write={"const": False}, ttl=GIVEN))
    for name in ("ChatRequest", "CompletionRequest"):
        _also(schemas[name], _needs("stream_options", GIVEN, stream=TRUE))
        _also(schemas[name], _never(stream=TRUE, prompt_logprobs=GIVEN))
        _also(schemas[name], _never(structured_outputs=GIVEN, response_format=_where(type={"not": {"const": "text"}})))
    _also(schemas["ChatRequest"], _needs("top_logprobs", {"type": "integer", "minimum": 1}, logprobs=TRUE))
    _also(schemas["ResponsesRequest"], _needs("stream_options", GIVEN, stream=TRUE))
    for name in ("ChatRequest", "ResponsesRequest"):
        must_call = {"not": {"enum": [None, "none", "auto"]}}
        _also(schemas[name], _needs("tool_choice", must_call, tools={"type": "array", "minItems": 1}))
    for branch in schemas["ResponsesRequest"]["properties"]["input"]["anyOf"]:
        if branch["type"] == "array":
            branch["minItems"] = 1
    schemas["EmbeddingRequest"]["properties"]["dimensions"]["anyOf"] = [{"const": hidden_size}, NULL]


def _messages() -> list[Schema]:
    """By role: who must have content, who may call, who answers a call."""
    text = {"anyOf": [{"type": "string"}, {"type": "array"}]}
    none = {"anyOf": [NULL, {"type": "array", "maxItems": 0}]}
    asks = _where(role={"enum": ["system", "developer", "user"]}, content=text)
    asks["properties"] |= {"tool_calls": none, "tool_call_id": NULL}
    answers = _where(role={"const": "assistant"})
    answers["properties"] |= {"tool_call_id": NULL}
    tells = _where(role={"const": "tool"}, content=text, tool_call_id={"type": "string"})
    tells["properties"] |= {"tool_calls": none}
    return [asks, answers, tells]


def _where(**fields: Schema) -> Schema:
    """These fields are there, and are so."""
    return {"properties": fields, "required": list(fields)}


def _has(name: str) -> Schema:
    return _where(**{name: GIVEN})


def _never(**fields: Schema) -> Schema:
    """Not all of these at once."""
    return {"not": _where(**fields)}


def _needs(name: str, value: Schema, **fields: Schema) -> Schema:
    """Where a field is so, these are so."""
    return {"anyOf": [{"not": _where(**{name: value})}, _where(**fields)]}


def _one_if_other(when: Mapping[str, Schema], name: str) -> Schema:
    """A field is given where others are so, and only there."""
    return {"oneOf": [_where(**when, **{name: GIVEN}), {"not": {"anyOf": [_where(**when), _has(name)]}}]}


def _also(schema: Schema, condition: Schema) -> None:
    schema.setdefault("allOf", []).append(condition)
