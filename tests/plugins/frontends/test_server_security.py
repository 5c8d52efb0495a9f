"""Who may ask, from where, and what is written down; nothing opens files, addresses or pickles for a client."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from engine import AsyncEngine, ConfigError, EngineConfig
from engine.core.keys import Keys
from engine.plugins.frontends.openai import OpenAIFrontend, OpenAIOptions

ROOT = Path(__file__).parents[3]
GOOD = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
NOTES = """
from engine.core import Policy, hookimpl

SEEN = []

class Notes(Policy):
    name = "notes"

    @hookimpl
    def admit(self, step, request):
        SEEN.append(dict(request.metadata))
"""


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module of a policy that writes down what requests say of themselves."""
    folder = tmp_path_factory.mktemp("notes")
    (folder / "notes_policy.py").write_text(NOTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import notes_policy

        yield notes_policy


@pytest.fixture(scope="module")
def engine(notes: Any) -> Iterator[AsyncEngine]:
    fields = {"executor": "sim", "policies": ["notes_policy:Notes"], "cors_origin": ["https://a.org"]}
    engine = AsyncEngine.launch(EngineConfig.model_validate(fields), in_process=True)
    yield engine
    engine.shutdown()


@pytest.fixture
def guarded(engine: AsyncEngine, tmp_path: Path) -> Any:
    file = tmp_path / "keys"
    file.write_text("team-a: sesame\nteam-b: poppy\n")
    frontend = OpenAIFrontend()
    frontend.guard(Keys(["plain"], file))
    return frontend.app(engine)


def client(app: Any, key: str | None = None, **headers: str) -> httpx.AsyncClient:
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test", headers=headers)


def routes_of(app: Any) -> list[tuple[str, str]]:
    found = [(method, route.path) for route in app.routes for method in route.methods if isinstance(route, APIRoute)]
    assert len(found) == len(app.routes) >= 15  # nothing else answers
    return found


def test_every_route_but_liveness_wants_a_key(guarded: Any) -> None:
    async def main() -> None:
        for key in (None, "wrong", "team-a", "sesame2", ""):
            async with client(guarded, key) as http:
                for method, path in routes_of(guarded):
                    answer = await http.request(method, path.replace("{name:path}", "sim"), json=GOOD)
                    if path == "/health/live":
                        assert answer.status_code == 200
                        continue
                    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
                    assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("sesame", "poppy", "plain"):
            async with client(guarded, key) as http:
                for path in ("/health", "/health/ready", "/metrics", "/v1/models", "/openapi.json", "/version"):
                    assert (await http.get(path)).status_code == 200

    asyncio.run(main())


def test_paths_that_are_opened_need_no_key_and_no_others(engine: AsyncEngine) -> None:
    frontend = OpenAIFrontend(OpenAIOptions(open_paths="/health/ready,/metrics"))
    app = frontend.app(engine, api_key="sesame")

    async def main() -> None:
        async with client(app) as http:
            found = {path: (await http.get(path)).status_code for path in ("/health/ready", "/metrics", "/v1/models")}
        assert found == {"/health/ready": 200, "/metrics": 200, "/v1/models": 401}

    asyncio.run(main())


def test_an_open_path_that_is_none_is_refused(engine: AsyncEngine) -> None:
    with pytest.raises(ConfigError, match="no path '/metric': did you mean '/metrics'"):
        OpenAIFrontend(OpenAIOptions(open_paths=("/metric",))).app(engine)


def test_the_label_is_the_tenant_whatever_the_client_says(engine: AsyncEngine, guarded: Any, notes: Any) -> None:
    async def main() -> str:
        for key in ("sesame", "poppy", "plain"):
            async with client(guarded, key) as http:
                body = {**GOOD, "metadata": {"tenant": "the boss", "x": "y"}}
                assert (await http.post("/v1/completions", json=body)).status_code == 200
                assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        async with client(guarded, "plain") as http:
            return (await http.get("/metrics")).text

    notes.SEEN.clear()
    text = asyncio.run(main())
    assert [seen.get("tenant") for seen in notes.SEEN] == [
        "team-a", "team-a", "team-b", "team-b", None, None,
    ]  # fmt: skip
    assert notes.SEEN[0]["x"] == notes.SEEN[4]["x"] == "y"
    for tenant in ("team-a", "team-b"):
        assert f'engine_tenant_requests_accepted_total{{tenant="{tenant}"}} 2.0' in text
        assert f'engine_tenant_requests_ended_total{{reason="length",tenant="{tenant}"}} 2.0' in text or (
            f'engine_tenant_requests_ended_total{{tenant="{tenant}",reason="length"}} 2.0' in text
        )
    assert "the boss" not in text  # what clients say of themselves makes no metric grow


def test_what_a_client_says_is_its_tenant_where_no_key_has_a_label(
    engine: AsyncEngine, tmp_path: Path, notes: Any
) -> None:
    """A path without a key is no way around the labels of others."""
    file = tmp_path / "keys"
    file.write_text("team-a: sesame\n")
    opened = OpenAIFrontend(OpenAIOptions(open_paths=("/v1/completions",)))
    opened.guard(Keys(file=file))

    async def main() -> None:
        body = {**GOOD, "metadata": {"tenant": "the boss"}}
        apps = (OpenAIFrontend().app(engine), None), (OpenAIFrontend().app(engine, api_key="key"), "key")
        for app, key in (*apps, (opened.app(engine), None)):
            async with client(app, key) as http:
                assert (await http.post("/v1/completions", json=body)).status_code == 200

    notes.SEEN.clear()
    asyncio.run(main())
    assert [seen.get("tenant") for seen in notes.SEEN] == ["the boss", "the boss", None]


def test_other_origins_are_let_in_by_name_only(engine: AsyncEngine, guarded: Any) -> None:
    asked_for = "authorization, content-type, x-stainless-lang, x-stainless-retry-count"  # as OpenAI's library does
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": asked_for}

    async def main() -> None:
        async with client(guarded, "sesame", origin="https://a.org") as http:
            answer = await http.get("/v1/models")
            assert answer.headers["access-control-allow-origin"] == "https://a.org"
            asked = await http.options("/v1/chat/completions", headers=preflight)
            assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "https://a.org")
            assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
            assert "access-control-allow-credentials" not in asked.headers
        async with client(guarded, "sesame", origin="https://b.org") as http:
            answer = await http.get("/v1/models")
            assert answer.status_code == 200
            assert "access-control-allow-origin" not in answer.headers
            assert (await http.options("/v1/chat/completions", headers=preflight)).status_code == 400

    asyncio.run(main())


def test_without_origins_there_is_no_cors(server: Any) -> None:
    headers = {"origin": "https://a.org", "access-control-request-method": "POST"}
    assert not [name for name in server.http.get("/v1/models", headers=headers).headers if "access-control" in name]
    assert server.http.options("/v1/chat/completions", headers=headers).status_code == 405


IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", {**GOOD, "model": "/etc/passwd"}, 404, "model_not_found"),
        ("/v1/completions", {**GOOD, "model": "../../etc/passwd"}, 404, "model_not_found"),
        ("/v1/chat/completions", {**CHAT, "model": "file:///etc/passwd"}, 404, "model_not_found"),
        ("/tokenize", {"prompt": "x", "model": "/etc/passwd"}, 404, "model_not_found"),
        ("/v1/chat/completions", {**CHAT, "chat_template": "{{ x }}"}, 400, None),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [IMAGE]}]}, 400, None),
    ],
)  # fmt: skip
def test_requests_open_no_file_and_no_address(
    engine: AsyncEngine, path: str, body: dict[str, Any], status: int, code: str | None
) -> None:
    """Refused by name, before anything could be opened."""
    app = OpenAIFrontend().app(engine)

    async def main() -> httpx.Response:
        async with client(app) as http:
            return await http.post(path, json=body)

    answer = asyncio.run(main())
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code or code is None
    assert "root:" not in answer.text


def test_nothing_here_unpickles() -> None:
    """Neither a module that does, nor a function of another library that does so inside."""
    modules = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    calls = {"recv_pyobj", "send_pyobj", "read_pickle", "load_pickle"}
    seen = 0
    for path in (file for part in ("core", "plugins", "cli", "proxy") for file in (ROOT / part).rglob("*.py")):
        seen += 1
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            assert not {name.split(".")[0] for name in names} & modules, path
            if isinstance(node, ast.Attribute):
                assert node.attr not in calls, path
                assert not (node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id == "torch"), path
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
    assert seen > 100


SECRET = "the-crown-jewels"


def ask_in_many_ways(server: Any) -> None:
    """Prompts that are served, refused, and fail in the engine, over all endpoints that take text."""
    http = server.http
    chat = {**CHAT, "messages": [{"role": "user", "content": SECRET}]}
    assert http.post("/v1/completions", json={**GOOD, "prompt": SECRET}).status_code == 200
    assert http.post("/v1/completions", json={**GOOD, "prompt": SECRET, "max_tokens": -1}).status_code == 400
    assert http.post("/v1/completions", json={**GOOD, "prompt": SECRET, "nonsense": SECRET}).status_code == 400
    assert http.post("/v1/completions", content=f'{{"prompt": "{SECRET}"'.encode()).status_code == 400
    http.post("/v1/chat/completions", json=chat)
    http.post("/v1/chat/completions", json={**chat, "stream": True})
    assert http.post("/tokenize", json={"prompt": SECRET}).status_code == 200
    assert http.post("/v1/completions", json={**GOOD, "prompt": [40_001]}).status_code == 500  # a step that raises
    assert http.post("/v1/completions", json={**GOOD, "prompt": SECRET, "user": SECRET}).status_code == 200


def test_prompts_are_not_in_the_logs(start: Any) -> None:
    server = start("--executor", "faulty_executor:FaultyExecutor", "--log-requests", "true",
                   "--api-key", "sesame", "--api-key", "poppy")  # fmt: skip
    server.http.headers["authorization"] = "Bearer poppy"
    ask_in_many_ways(server)
    assert server.stop() == 0
    assert "the device fell off" in server.output
    assert re.search(r"POST /v1/completions 200 \d+\.\d+ s id=[0-9a-f]{32} tenant=-", server.output)
    assert not {SECRET, "sesame", "poppy"} & set(re.findall(r"[\w-]+", server.output))


def test_prompts_are_in_the_logs_where_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    fields = {"executor": "sim", "log_prompts": True}
    engine = AsyncEngine.launch(EngineConfig.model_validate(fields), in_process=True)

    async def main() -> None:
        async with client(OpenAIFrontend().app(engine), **{"x-request-id": "mine"}) as http:
            assert (await http.post("/v1/completions", json={**GOOD, "prompt": SECRET})).status_code == 200
            assert (await http.post("/v1/completions", json=GOOD)).status_code == 200

    try:
        with caplog.at_level("INFO", logger="engine.requests"):
            asyncio.run(main())
    finally:
        engine.shutdown()
    assert caplog.messages == [f"prompt of mine: {SECRET!r}", "prompt of mine: [1, 2, 3]"]


def test_keys_change_with_their_file(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a: first\n")
    server = start("--executor", "sim", "--api-key-file", str(file))

    def status(key: str) -> int:
        return int(server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code)

    def becomes(key: str, wanted: int) -> None:
        server.until(lambda: status(key) == wanted, f"{key} is never answered {wanted}")

    assert (status("first"), status("second")) == (200, 401)
    file.write_text("a: second\n")
    server.process.send_signal(signal.SIGHUP)
    becomes("second", 200)
    assert status("first") == 401
    file.write_text("")
    server.process.send_signal(signal.SIGHUP)
    server.until(lambda: "the API keys stay as they were" in server.output, "nothing is said of the empty file")
    assert status("second") == 200
    assert server.stop() == 0


@pytest.fixture
def hangups_end() -> Iterator[None]:
    """Processes that are started are ended by SIGHUP, also where this one is not."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_keys_change_while_the_model_loads_and_a_hang_up_reaches_no_core(
    start: Any, tmp_path: Path, hangups_end: None
) -> None:
    file, go = tmp_path / "keys", tmp_path / "go"
    file.write_text("a: first\n")
    server = start("--executor", "faulty_executor:SlowToLoad", "--api-key-file", str(file), own_group=True,
                   until=r"starting +(http://[^/\s]+)", env={"LOAD_WHEN": str(go)})  # fmt: skip
    file.write_text("a: second\n")
    os.killpg(server.process.pid, signal.SIGHUP)
    go.touch()
    server._wait_for(r"listening on (\S+)")

    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return int(server.http.post("/v1/completions", json=GOOD, headers=headers).status_code)

    def becomes(key: str, wanted: int) -> None:
        server.until(lambda: status(key) == wanted, f"{key} is never answered {wanted}")

    becomes("second", 200)
    assert status("first") == 401
    file.write_text("a: third\n")
    os.killpg(server.process.pid, signal.SIGHUP)
    becomes("third", 200)  # by the same core
    assert status("second") == 401
    assert server.stop() == 0


@pytest.mark.parametrize("flags", [(), ("--api-key", "one", "--api-key", "two")])
def test_a_hang_up_ends_a_server_without_a_file_of_keys(start: Any, flags: tuple[str, ...], hangups_end: None) -> None:
    server = start("--executor", "sim", *flags, own_group=True)
    assert server.core_pid is not None
    assert server.stop(signal.SIGHUP, group=True) == -signal.SIGHUP
    server.until(lambda: not os.path.exists(f"/proc/{server.core_pid}"), "the core outlives it")


def test_a_frontend_of_one_key_is_not_left_open() -> None:
    from engine.core.protocols import Frontend

    class Simple(Frontend):
        name = "simple"

        def serve(self, engine: Any, *, host: str, port: int, api_key: str | None = None) -> int:
            raise AssertionError("it must not come so far")

    from engine.cli.serve import prepare

    assert prepare(Simple(), EngineConfig(api_key="one")) == "one"
    assert prepare(Simple(), EngineConfig()) is None
    with pytest.raises(ConfigError, match="simple knows one key only"):
        prepare(Simple(), EngineConfig(api_key=("one", "two")))
