"""The six ways to embed an engine, as the examples show them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from engine import LLM, AsyncEngine, ConfigError, EngineConfig, ModelError, SamplingParams, http_app

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "embedding"
SIM = {"name": "sim", "step_ms": 1}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    """The module that the test is named for by ``indirect``."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(request.param)


def test_the_document_shows_the_examples() -> None:
    """Word for word, below their own docstrings."""
    document = (ROOT / "docs" / "embedding.md").read_text()
    shown = dict(
        re.findall(r"\[examples/embedding/(\w+\.py)\]\S*\n\n```py\n(.*?)^```", document, re.DOTALL | re.MULTILINE)
    )
    files = {path.name: path.read_text() for path in FOLDER.glob("*.py")}
    assert shown == {name: text.split('"""\n\n', 1)[1] for name, text in files.items()}


# ---- inside another application


class Host:
    """The example under uvicorn, in a process of its own."""

    def __init__(self, fields: str, more: str = "") -> None:
        code = textwrap.dedent(f"""
            import uvicorn, fastapi_app
            app = fastapi_app.create_app({fields})
            {more}
            uvicorn.run(app, port=0)
        """)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(FOLDER)},
        )  # fmt: skip
        self.lines: list[str] = []
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()), daemon=True)
        self.reader.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def url(self) -> str:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"running on (http://\S+)", self.output)):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)
        return found[1]

    def wait(self) -> int:
        code = self.process.wait(60)
        self.reader.join()
        return code


@contextlib.contextmanager
def host(fields: str, more: str = "") -> Iterator[Host]:
    started = Host(fields, more)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.wait()
        assert started.process.stdout is not None
        started.process.stdout.close()


MIDDLEWARE = """
@app.middleware("http")
async def stamp(request, call_next):
    response = await call_next(request)
    response.headers["x-shop"] = "yes"
    return response
"""


def pinned(client: httpx.Client) -> float:
    text = client.get("/llm/metrics").raise_for_status().text
    return float(re.search(r"^engine_kv_pages_pinned (\S+)", text, re.MULTILINE)[1])  # type: ignore[index]


def test_a_host_serves_its_own_routes_and_the_engines() -> None:
    with host(f"executor={SIM!r}, audit=True", textwrap.indent(MIDDLEWARE, " " * 12).lstrip()) as running:
        with httpx.Client(base_url=running.url(), timeout=60) as client:
            own = client.get("/slogan/cheese").raise_for_status()
            assert own.json()["tokens"] == 16
            assert own.headers["x-shop"] == "yes"
            wish = {"prompt": "Once upon", "max_tokens": 5}
            answer = client.post("/llm/v1/completions", json=wish).raise_for_status()
            assert answer.json()["usage"]["completion_tokens"] == 5
            assert answer.headers["x-shop"] == "yes"
            assert client.get("/llm/v1/models").json()["data"][0]["id"] == "sim"
            assert client.get("/llm/health").json()["status"] == "ok"
            assert "/v1/chat/completions" in client.get("/llm/openapi.json").json()["paths"]
            assert "/slogan/{thing}" in client.get("/openapi.json").json()["paths"]
            assert client.get("/llm/nowhere").json()["error"]["code"] == "not_found"
            assert client.get("/nowhere").json() == {"detail": "Not Found"}  # the host's own words

            endless = {"prompt": "Once", "max_tokens": 8000, "stream": True}
            with client.stream("POST", "/llm/v1/completions", json=endless) as stream:
                lines = stream.iter_lines()  # kept: httpx closes the response with it
                next(lines)
                assert pinned(client) > 0
            deadline = time.monotonic() + 20
            while pinned(client):  # it left in the middle, through the host's middleware
                assert time.monotonic() < deadline
                time.sleep(0.02)
        os.kill(running.process.pid, signal.SIGTERM)
        running.wait()
        assert "Application shutdown complete" in running.output
        assert "Traceback" not in running.output


@pytest.mark.parametrize("fields", ["model='no/such/model/here'", "executor='sim', kvcache='nonsense'"])
def test_an_engine_that_cannot_start_stops_the_hosts_start(fields: str) -> None:
    with host(fields) as running:
        assert running.wait() == 3  # uvicorn's word for it
        assert "Application startup failed" in running.output
        assert re.search(r"(ModelError|PluginError): .*(no/such/model/here|nonsense)", running.output)


@pytest.mark.parametrize("example", ["fastapi_app"], indirect=True)
def test_a_host_starts_again_and_again(example: ModuleType) -> None:
    """As test clients do: each start has an engine of its own, each end leaves none."""
    app = example.create_app(executor="sim")
    before = list(app.router.routes)

    async def visit() -> dict[str, Any]:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                wish = {"prompt": [1, 2, 3], "max_tokens": 4}
                answer = (await client.post("/llm/v1/completions", json=wish)).raise_for_status().json()
                return dict(answer["choices"][0])

    assert asyncio.run(visit()) == asyncio.run(visit())
    assert list(app.router.routes) == before
    assert app.state.engine.health().cause == "the engine was closed"

    async def fails() -> None:
        with pytest.raises(ModelError, match="no/such/model"):
            async with example.create_app(model="no/such/model").router.lifespan_context(app):
                raise AssertionError("it started")

    asyncio.run(fails())


def test_what_is_mounted_is_the_frontend_of_the_configuration() -> None:
    async def main() -> None:
        config = EngineConfig(executor="sim", frontend={"name": "openai", "served_model_name": "mine"})
        async with await AsyncEngine.start(config, in_process=True) as engine:
            apps = {
                "mine": http_app(engine, api_key="secret"),
                "yours": http_app(engine, frontend={"name": "openai", "served_model_name": "yours"}),
            }
            for name, app in apps.items():
                async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
                    answer = await client.get("/v1/models", headers={"authorization": "Bearer secret"})
                    assert answer.json()["data"][0]["id"] == name
                    assert (await client.get("/v1/models")).status_code == (401 if name == "mine" else 200)
            with pytest.raises(ConfigError, match="the API key is empty"):
                http_app(engine, api_key=" ")
            with pytest.raises(ConfigError, match="served_model_nam"):
                http_app(engine, frontend={"name": "openai", "served_model_nam": "x"})

    asyncio.run(main())


def test_the_keys_of_the_configuration_guard_what_is_mounted(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("team-a: sesame\n")

    async def statuses(engine: AsyncEngine, **options: Any) -> dict[str | None, int]:
        transport = httpx.ASGITransport(http_app(engine, **options))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return {
                key: (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code
                for key in ("", "one", "two", "sesame", "own")
            }

    async def main(right: set[str], **keys: Any) -> None:
        async with await AsyncEngine.start(EngineConfig(executor="sim", **keys), in_process=True) as engine:
            assert {key for key, status in (await statuses(engine)).items() if status == 200} == right
            assert {key for key, status in (await statuses(engine, api_key="own")).items() if status == 200} == {"own"}

    asyncio.run(main({"one"}, api_key="one"))
    asyncio.run(main({"one", "two", "sesame"}, api_key=("one", "two"), api_key_file=str(file)))


# ---- a notebook


@pytest.mark.model
def test_a_notebook(capfd: pytest.CaptureFixture[str]) -> None:
    """In Jupyter an event loop runs in the very thread that executes cells: so it does here."""

    async def cells() -> None:
        assert asyncio.get_running_loop()
        runpy.run_path(str(FOLDER / "notebook.py"))

    asyncio.run(cells())
    said = capfd.readouterr()
    assert "Paris" in said.out
    assert "four, five, six" in said.out
    assert re.search(r"^(3[0-9]|[4-9][0-9]) of \d+ tokens were cached$", said.out, re.MULTILINE)
    assert "prompts" in said.err


# ---- asyncio


@pytest.mark.model
@pytest.mark.parametrize("example", ["asyncio_client"], indirect=True)
def test_an_asyncio_program(example: ModuleType) -> None:
    results = asyncio.run(example.main(EngineConfig(num_pages=256, audit=True)))
    assert "Paris" in results["many"][0]
    assert "Rome" in results["many"][1]
    assert results["timeout"] == "too slow"
    assert results["cancelled"] is True
    assert results["first_sentence"].count(".") == 1
    assert results["by_name"] == "abort"
    assert results["aborted"] == 4
    assert results["pages in use"] == 0


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("way", ["cancel", "timeout", "break", "drop", "aclose", "raise"])
def test_whoever_leaves_frees_the_pages(way: str, in_process: bool) -> None:
    endless = SamplingParams(max_tokens=8000)

    async def leave(engine: AsyncEngine) -> None:
        if way == "cancel":
            task = asyncio.create_task(engine.complete([1], endless))
            while not (await engine.stats())["running"]:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.complete([1], endless), 0.1)
        elif way == "raise":
            with contextlib.suppress(ZeroDivisionError):
                async for _ in engine.generate([1], endless):
                    raise ZeroDivisionError
        else:
            stream = engine.generate([1], endless)
            async for _ in stream:
                break
            if way == "aclose":
                await stream.aclose()  # type: ignore[attr-defined]
            elif way == "drop":
                del stream

    async def main() -> None:
        config = EngineConfig(executor=SIM, audit=True)
        async with await AsyncEngine.start(config, in_process=in_process) as engine:
            baseline = (await engine.stats())["pages_pinned"]
            await leave(engine)
            async with asyncio.timeout(20):
                while (await engine.stats())["pages_pinned"] != baseline:
                    await asyncio.sleep(0.001)
            assert engine.ledger.ended["abort"] == 1
            assert (await engine.complete([1], SamplingParams(max_tokens=3))).finish_reason == "length"

    asyncio.run(main())


# ---- the others


@pytest.mark.model
@pytest.mark.parametrize("example", ["two_engines"], indirect=True)
def test_two_engines(example: ModuleType) -> None:
    texts = list(example.main().values())
    assert texts[0] == texts[1]
    assert "Paris" in texts[0][0]


def test_two_engines_of_other_weights_do_not_meet() -> None:
    with LLM(executor="sim") as one, LLM(executor="sim", kvcache="radix") as other:
        few = SamplingParams(max_tokens=5)
        [before] = other.generate([1, 2], few)
        one.update_weights({"step": 1})
        assert other.generate([1, 2], few)[0].token_ids == before.token_ids != one.generate([1, 2], few)[0].token_ids
        assert one.core.model.fingerprint != other.core.model.fingerprint


@pytest.mark.parametrize("example", ["rollout"], indirect=True)
def test_rollouts_get_better(example: ModuleType) -> None:
    import torch

    with torch.random.fork_rng():
        means = example.main(8)
    assert means[0] < 0.6
    assert means[-1] > 0.9


@pytest.mark.parametrize("example", ["stepping"], indirect=True)
def test_stepping_by_hand(example: ModuleType) -> None:
    assert example.main() == example.main()
    assert len(example.main()) == 4
