"""Whatever is sent to whatever endpoint, by its own schema and beside it: an answer, or an error that says what is
wrong; never a fault of ours, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import AsyncEngine, EngineConfig
from engine.plugins.frontends.openai import OpenAIFrontend

FIELDS = {"executor": {"name": "sim", "max_model_len": 64}, "num_pages": 64, "max_running": 4}
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70),
    st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**30, 49151, 49152]),
    st.floats(-3, 3), st.sampled_from([1e308, -1e308, 1e-320, 0.0]), st.text(max_size=8),
    st.sampled_from(["", "\x00", "🦜", "e\u0301", "{{ x }}", "user", "assistant", "sim", "text", "auto", "a" * 3000]),
)  # fmt: skip
NAMES = ["role", "content", "type", "text", "include_usage", "read", "write", "salt", "5", "name", "url", "x"]
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
        st.lists(st.integers(0, 60), min_size=1, max_size=5),
    ),
    max_leaves=6,
)  # fmt: skip
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": VALUES}),
    max_size=3,
)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, list[tuple[str, list[str], list[str]]], asyncio.Runner]]:
    """An application, what it takes, and the one event loop in which it is asked."""
    engine = AsyncEngine.launch(EngineConfig.model_validate(FIELDS), in_process=True)
    app = OpenAIFrontend().app(engine)
    with asyncio.Runner() as runner:
        yield app, endpoints(app.openapi()), runner
    engine.shutdown()


def endpoints(document: dict[str, Any]) -> list[tuple[str, list[str], list[str]]]:
    """Path, field names, and those required, of every endpoint that takes a body."""
    found = []
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        if body is not None:
            name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
            schema = document["components"]["schemas"][name]
            found.append((path, sorted(schema["properties"]), schema.get("required", [])))
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_that_is_sent_is_a_fault_of_ours(served: Any, data: st.DataObject) -> None:
    app, known, runner = served
    path, fields, required = data.draw(st.sampled_from(known), label="endpoint")
    chosen = data.draw(st.lists(st.sampled_from(fields), max_size=4, unique=True), label="fields")
    body: dict[str, Any] = {name: data.draw(VALUES, label=name) for name in [*chosen, *required]}
    if "max_tokens" in fields and data.draw(st.booleans(), label="mostly good"):
        body |= {"max_tokens": 4}
        if "messages" in fields:
            body["messages"] = data.draw(TURNS, label="messages")
        elif "prompt" in fields:
            body["prompt"] = [1, 2, 3]

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
            return await http.post(path, json=body), await http.get("/health")

    answer, health = runner.run(ask())
    assert answer.status_code in (200, 400, 404, 409, 413, 429), (path, body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert error["code"]
    elif "event-stream" in answer.headers["content-type"]:
        assert answer.text.endswith("data: [DONE]\n\n"), (path, body, answer.text)
    assert (health.status_code, health.json()["open_requests"]) == (200, 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/cache/explain"]),
    body=st.one_of(st.binary(max_size=60), VALUES.map(lambda value: repr(value).encode(errors="replace"))),
)
def test_bytes_that_are_no_request(served: Any, path: str, body: bytes) -> None:
    app, _, runner = served

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
            return await http.post(path, content=body)

    assert runner.run(ask()).status_code == 400


def test_the_document_declares_what_its_paths_hold(served: Any) -> None:
    app, _, runner = served

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
            return await http.get("/openapi.json")

    document = runner.run(ask()).json()
    [parameter] = document["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert (parameter["name"], parameter["in"], parameter["required"]) == ("name", "path", True)
    assert len(endpoints(document)) >= 8
