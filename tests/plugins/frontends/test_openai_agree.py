"""What ``/openapi.json`` says of fields that belong together or exclude each other is what happens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from engine import AsyncEngine, EngineConfig
from engine.plugins.frontends.openai import OpenAIFrontend

TURN = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"name": "a", "schema": {"type": "object"}}
COMPLETION, CHAT = "/v1/completions/render", "/v1/chat/completions/render"
TYPES = {"null": type(None), "string": str, "array": list, "object": dict, "boolean": bool}


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": "sim"}), in_process=True)
    yield OpenAIFrontend().app(engine)
    engine.shutdown()


def is_type(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        return isinstance(value, int if name == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, TYPES[name])


class Verdict:
    """Whether a value is as a JSON Schema says, by the keywords that the document uses; what it does not know it
    leaves alone."""

    def __init__(self, document: Any) -> None:
        self._schemas = document["components"]["schemas"]

    def __call__(self, schema: Any, value: Any) -> bool:
        if isinstance(schema, bool):
            return schema
        return all(
            getattr(self, f"_{key.strip('$')}", self._other)(said, value, schema) for key, said in schema.items()
        )

    def _other(self, said: Any, value: Any, schema: Any) -> bool:
        return True

    def _ref(self, said: str, value: Any, schema: Any) -> bool:
        return self(self._schemas[said.rpartition("/")[2]], value)

    def _type(self, said: str, value: Any, schema: Any) -> bool:
        return is_type(value, said)

    def _const(self, said: Any, value: Any, schema: Any) -> bool:
        return type(value) is type(said) and value == said

    def _enum(self, said: Any, value: Any, schema: Any) -> bool:
        return any(self._const(one, value, schema) for one in said)

    def _not(self, said: Any, value: Any, schema: Any) -> bool:
        return not self(said, value)

    def _anyOf(self, said: Any, value: Any, schema: Any) -> bool:
        return any(self(one, value) for one in said)

    def _allOf(self, said: Any, value: Any, schema: Any) -> bool:
        return all(self(one, value) for one in said)

    def _oneOf(self, said: Any, value: Any, schema: Any) -> bool:
        return sum(self(one, value) for one in said) == 1

    def _properties(self, said: Any, value: Any, schema: Any) -> bool:
        return not isinstance(value, dict) or all(self(one, value[name]) for name, one in said.items() if name in value)

    def _additionalProperties(self, said: Any, value: Any, schema: Any) -> bool:
        known = schema.get("properties", ())
        return not isinstance(value, dict) or all(self(said, one) for name, one in value.items() if name not in known)

    def _propertyNames(self, said: Any, value: Any, schema: Any) -> bool:
        return not isinstance(value, dict) or all(re.search(said["pattern"], name) for name in value)

    def _required(self, said: Any, value: Any, schema: Any) -> bool:
        return not isinstance(value, dict) or set(said) <= set(value)

    def _items(self, said: Any, value: Any, schema: Any) -> bool:
        return not isinstance(value, list) or all(self(said, one) for one in value)

    def _bounded(self, value: Any, kind: Any, holds: Callable[[Any], bool]) -> bool:
        return not isinstance(value, kind) or isinstance(value, bool) or holds(value)

    def _minItems(self, said: int, value: Any, schema: Any) -> bool:
        return self._bounded(value, list, lambda one: len(one) >= said)

    def _maxItems(self, said: int, value: Any, schema: Any) -> bool:
        return self._bounded(value, list, lambda one: len(one) <= said)

    def _minimum(self, said: float, value: Any, schema: Any) -> bool:
        return self._bounded(value, int | float, lambda one: one >= said)

    def _maximum(self, said: float, value: Any, schema: Any) -> bool:
        return self._bounded(value, int | float, lambda one: one <= said)


def completion(**fields: Any) -> tuple[str, Any]:
    return COMPLETION, {"prompt": [1], "max_tokens": 1, **fields}


def chat(*turns: Any, **fields: Any) -> tuple[str, Any]:
    return CHAT, {"messages": list(turns) or [TURN], "max_tokens": 1, **fields}


def response(**fields: Any) -> tuple[str, Any]:
    return "/v1/responses", {"input": "hi", "max_output_tokens": 1, **fields}


GOOD = [
    ("/tokenize", {"prompt": "a"}), ("/tokenize", {"messages": [TURN], "prompt": None}),
    completion(stream_options=None), completion(stream=True, stream_options={"include_usage": True}),
    completion(logit_bias={"7": 1}), completion(prompt_logprobs=1), completion(stream=True, prompt_logprobs=None),
    completion(cache={"write": True, "ttl": 1.0}), completion(cache={"write": False}),
    completion(structured_outputs={"regex": "a", "json": None}), completion(structured_outputs={"json_object": True}),
    completion(response_format={"type": "text"}, structured_outputs={"choice": ["a"]}),
    completion(response_format={"type": "json_schema", "json_schema": SCHEMA}),
    completion(response_format={"type": "json_object", "json_schema": None}),
    chat({"role": "assistant"}), chat({"role": "assistant", "content": None, "tool_calls": [CALL]}),
    chat({"role": "tool", "content": "a", "tool_call_id": "c"}), chat({**TURN, "tool_calls": []}),
    chat(logprobs=True, top_logprobs=2), chat(top_logprobs=0), chat(tool_choice="auto"), chat(tool_choice=None),
    chat(tools=[TOOL], tool_choice=NAMED), chat(tools=[TOOL], tool_choice="required"),
    response(stream_options=None), response(tool_choice="none"),
    ("/v1/embeddings", {"input": [1], "dimensions": 32}), ("/v1/embeddings", {"input": [1], "dimensions": None}),
]  # fmt: skip
BAD = [
    ("/tokenize", {}), ("/tokenize", {"prompt": None}), ("/tokenize", {"prompt": "a", "messages": [TURN]}),
    completion(stream_options={"include_usage": True}), completion(stream=False, stream_options={}),
    completion(stream=True, prompt_logprobs=1), completion(cache={"write": False, "ttl": 1.0}),
    completion(structured_outputs={}), completion(structured_outputs={"regex": "a", "choice": ["a"]}),
    completion(structured_outputs={"json_object": False}),
    completion(response_format={"type": "json_object"}, structured_outputs={"choice": ["a"]}),
    completion(response_format={"type": "json_schema"}),
    completion(response_format={"type": "text", "json_schema": SCHEMA}),
    chat({"role": "user"}), chat({"role": "tool", "content": "a"}), chat({"role": "tool", "tool_call_id": "c"}),
    chat({**TURN, "tool_call_id": "c"}), chat({**TURN, "tool_calls": [CALL]}),
    chat({"role": "assistant", "content": "a", "tool_call_id": "c"}),
    chat(max_tokens=0), completion(logit_bias={"a": 1}),
    chat(top_logprobs=2), chat(logprobs=False, top_logprobs=1), chat(stream_options={}),
    chat(tool_choice="required"), chat(tool_choice=NAMED), chat(tools=[], tool_choice="required"),
    response(stream_options={}), response(tool_choice="required"),
    response(tool_choice={"type": "function", "name": "f"}),
    ("/v1/embeddings", {"input": [1], "dimensions": 0}),
]  # fmt: skip


@pytest.mark.model  # its chat template
@pytest.mark.parametrize(
    ("path", "body", "good"), [(*one, True) for one in GOOD] + [(*one, False) for one in BAD], ids=ascii
)
def test_what_goes_together_is_as_told(app: Any, path: str, body: dict[str, Any], good: bool) -> None:
    document = app.openapi()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert Verdict(document)(schema, body) is good

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
            return await http.post(path, json=body)

    answer = asyncio.run(ask())
    assert answer.status_code == (200 if good else 400), answer.text


def test_a_path_says_all_its_methods(app: Any) -> None:
    async def ask(method: str, path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
            return await http.request(method, path)

    for method in ("OPTIONS", "DELETE"):
        answer = asyncio.run(ask(method, "/debug/record"))
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")
    assert asyncio.run(ask("GET", "/v1/completions")).headers["allow"] == "POST"
