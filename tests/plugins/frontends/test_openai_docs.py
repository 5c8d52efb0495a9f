"""``/openapi.json`` says what is answered: every status, every shape, every bound that it names."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine import AsyncEngine, EngineConfig
from engine.plugins.frontends import _openai_shapes as shapes
from engine.plugins.frontends._openai_docs import ANSWERS, EVENTS
from engine.plugins.frontends.openai import OpenAIFrontend, OpenAIOptions

GOOD = {"prompt": [1, 2, 3], "max_tokens": 2, "logprobs": 2, "prompt_logprobs": 1, "echo": True, "n": 2}
TURN = {"role": "user", "content": "hi"}
CHAT = {"messages": [TURN], "max_tokens": 2, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 0}
ASKED: dict[str, dict[str, Any] | None] = {
    "/v1/completions": GOOD,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/embeddings": {"input": ["hi", "ho"]},
    "/v1/completions/render": GOOD,
    "/v1/chat/completions/render": CHAT,
    "/tokenize": {"prompt": "hi", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2]},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    fields = {"executor": "sim", "max_logprobs": 7, "cache_events": "on"}
    engine = AsyncEngine.launch(EngineConfig.model_validate(fields), in_process=True)
    yield engine
    engine.shutdown()


def ask(app: Any, method: str, path: str, **more: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
            return await http.request(method, path, **more)

    return asyncio.run(main())


@pytest.mark.parametrize("path", ANSWERS)
def test_answers_have_the_shape_that_is_told(engine: AsyncEngine, path: str) -> None:
    app = OpenAIFrontend().app(engine)
    body = ASKED.get(path)
    method = "GET" if body is None else "POST"
    answer = ask(app, method, path.replace("{name}", "sim"), **({} if body is None else {"json": body}))
    assert answer.status_code == 200, answer.text
    said = app.openapi()["paths"][path][method.lower()]["responses"]["200"]["content"]
    assert answer.headers["content-type"] in said
    found = msgspec.json.decode(answer.content)
    msgspec.convert(found, ANSWERS[path])
    assert "$ref" in said["application/json"]["schema"]


def test_errors_and_streams_too(engine: AsyncEngine) -> None:
    app = OpenAIFrontend(OpenAIOptions(max_body_bytes=1024)).app(engine, api_key="sesame")
    key = {"authorization": "Bearer sesame"}
    paths = app.openapi()["paths"]
    for method, path, status, more in (
        ("POST", "/v1/completions", 400, {"json": {}}),
        ("POST", "/v1/completions", 401, {"json": GOOD, "headers": {}}),
        ("POST", "/v1/completions", 404, {"json": {**GOOD, "model": "x"}}),
        ("POST", "/v1/completions", 408, {"json": {"prompt": [1], "max_tokens": 8000, "deadline_ms": 1}}),
        ("POST", "/v1/completions", 413, {"content": b" " * 2000}),
        ("POST", "/tokenize", 413, {"content": b" " * 2000}),
        ("POST", "/v1/cache/explain", 400, {"json": {}}),
        ("GET", "/v1/cache/events", 410, {"params": {"from": 3, "epoch": "other"}}),
        ("GET", "/v1/cache/events", 400, {"params": {"from": "x"}}),
        ("GET", "/v1/models/other", 404, {}),
        ("GET", "/metrics", 200, {}),
    ):
        answer = ask(app, method, path, **{"headers": key, **more})
        assert answer.status_code == status, (path, answer.text)
        operation = paths[path.replace("/other", "/{name}")][method.lower()]
        assert answer.headers["content-type"] in operation["responses"][str(status)]["content"], path
        if status != 200:
            msgspec.convert(answer.json(), shapes.ErrorAnswer)
    for path, body in ASKED.items():
        if EVENTS in (told := paths[path]["post"]["responses"]["200"]["content"]):
            streamed = {name: value for name, value in (body or {}).items() if name != "prompt_logprobs"}
            answer = ask(app, "POST", path, json={**streamed, "stream": True}, headers=key)
            assert answer.headers["content-type"].partition(";")[0] in told


def test_keys_are_told_where_there_are_some(engine: AsyncEngine) -> None:
    document = OpenAIFrontend(OpenAIOptions(open_paths=("/metrics",))).app(engine, api_key="sesame").openapi()
    open_ones = {path for path, operations in document["paths"].items() for one in operations.values()
                 if "security" not in one}  # fmt: skip
    assert open_ones == {"/health/live", "/metrics"}
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    free = OpenAIFrontend().app(engine).openapi()
    assert "securitySchemes" not in free["components"]
    assert "401" not in free["paths"]["/v1/models"]["get"]["responses"]


def test_bounds_are_those_in_force(engine: AsyncEngine) -> None:
    """What is at a bound is accepted as far as the bound goes, what is beyond it is refused."""
    app = OpenAIFrontend().app(engine)
    fields = app.openapi()["components"]["schemas"]["CompletionRequest"]["properties"]
    tried = 0
    for name, field in fields.items():
        for branch in field.get("anyOf", ()):
            for bound, step in (("minimum", -1), ("maximum", 1)):
                if (value := branch.get(bound)) is None or name in ("max_tokens", "min_tokens", "deadline_ms"):
                    continue
                base = {"prompt": [1], "max_tokens": 1}
                assert ask(app, "POST", "/v1/completions/render", json={**base, name: value}).status_code == 200, name
                beyond = ask(app, "POST", "/v1/completions/render", json={**base, name: value + step})
                assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, name)
                tried += 1
    assert tried > 20
    assert fields["logprobs"]["anyOf"][0]["maximum"] == 7
    text, texts, _ = fields["stop"]["anyOf"]
    assert text["minLength"] == texts["items"]["minLength"] == 1
    for stop in ("", ["a", ""]):
        refused = ask(app, "POST", "/v1/completions/render", json={"prompt": [1], "stop": stop})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop")


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, "sesame"])
def test_schemathesis_finds_nothing(start: Any, tmp_path: Path, key: str | None) -> None:
    """Thousands of requests by the document, and beside it. It needs the command, here or where the variable says."""
    command = shutil.which(os.environ.get("SCHEMATHESIS", "schemathesis"))
    if command is None:
        pytest.skip("needs pip install schemathesis, or the variable SCHEMATHESIS with the path of its command")
    server = start("--executor", "sim", "--executor.step-ms", "1", "--max-model-len", "128", "--cache-events", "on",
                   *(() if key is None else ("--api-key", key)))  # fmt: skip
    headers = [] if key is None else ["--header", f"Authorization: Bearer {key}"]
    server.http.headers.update({} if key is None else {"authorization": f"Bearer {key}"})
    checks = ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]  # fields may contradict each other
    assert server.http.get("/openapi.json").status_code == 200
    done = subprocess.run(
        [command, "run", f"{server.url}/openapi.json", *headers, *checks, "--max-examples", "100",
         "--exclude-path", "/v1/cache/events", "--continue-on-failure"],
        capture_output=True, text=True, timeout=3600, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert server.idle()["engine_kv_pages_pinned"] == 0
    assert "Traceback" not in server.output
