"""What the server counts: once, under the right name, also when it is idle (case B48); the documents know all of it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import AsyncEngine, EngineConfig
from engine.core.plan import Why
from engine.core.serve.asks import Ask
from engine.plugins.frontends.openai import OpenAIFrontend

ROOT = Path(__file__).parents[3]
GOOD = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
PATIENCE = 60.0


@pytest.fixture
def embedded() -> Iterator[AsyncEngine]:
    engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": "sim"}), in_process=True)
    yield engine
    engine.shutdown()


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


def families(server: Any) -> dict[str, str]:
    """Name of each family as a dashboard asks for it -> its type."""
    text = server.http.get("/metrics").raise_for_status().text
    found = {}
    for one in text_string_to_metric_families(text):
        found[one.name + ("_total" if one.type == "counter" else "")] = one.type
    return found


def test_the_table_of_metrics_is_what_there_is(server: Any) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    ours, known = page.split("## vLLM's names")
    told = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", ours, re.MULTILINE))
    there = families(server)
    assert told == {name: kind for name, kind in there.items() if not name.startswith("vllm:")}
    pairs = dict(re.findall(r"^\| `(vllm:\w+)` \| `(\w+)` \|", known, re.MULTILINE))
    assert set(pairs) == {name for name in there if name.startswith("vllm:")}
    assert set(pairs.values()) <= set(told)


def test_the_dashboard_asks_for_what_there_is(server: Any) -> None:
    board = json.loads((ROOT / "examples" / "grafana" / "engine.json").read_text())
    there = families(server)
    asked: set[str] = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"\bengine_\w+", target["expr"])
            assert names, panel["title"]
            asked |= {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}
    assert asked - set(there) == set()
    assert len(asked) > 20
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)


async def samples(http: httpx.AsyncClient) -> dict[str, float]:
    """All samples by name and labels, the two labels of vLLM's left out."""
    text = (await http.get("/metrics")).raise_for_status().text
    text = re.sub(r',?(model_name="sim"|engine="0")', "", text).replace("{,", "{").replace("{}", "")
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_known_names_say_the_same_as_ours(embedded: AsyncEngine) -> None:
    async def main() -> dict[str, float]:
        async with client(OpenAIFrontend().app(embedded)) as http:
            for _ in range(3):
                answer = await http.post("/v1/completions", json={**GOOD, "prompt": list(range(40))})
                assert answer.status_code == 200
            return await samples(http)

    now = asyncio.run(main())
    assert now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == 0
    assert now["vllm:kv_cache_usage_perc"] == 0
    assert now["vllm:prompt_tokens_total"] == now["engine_prompt_tokens_total"] == 120
    assert now["vllm:generation_tokens_total"] == now["engine_output_tokens_total"] == 24
    assert now["vllm:prefix_cache_queries_total"] == now["engine_looked_up_tokens_total"] == 120
    assert now["vllm:prefix_cache_hits_total"] == now["engine_cached_tokens_total"] > 0
    assert now['vllm:request_success_total{finished_reason="length"}'] == 3
    assert now["vllm:time_to_first_token_seconds_count"] == now["engine_time_to_first_token_seconds_count"] == 3
    assert now["vllm:inter_token_latency_seconds_count"] == now["engine_inter_token_seconds_count"]
    assert now["vllm:e2e_request_latency_seconds_count"] == now["engine_request_seconds_count"] == 3
    assert now["vllm:request_queue_time_seconds_count"] == 3
    assert now["vllm:iteration_tokens_total_sum"] == now["engine_batch_tokens_sum"]
    assert now["engine_batch_tokens_sum"] == now["engine_computed_tokens_total"]
    assert now["engine_step_seconds_count"] == now["engine_batch_tokens_count"] > 0


def test_why_requests_wait() -> None:
    fields = {"executor": {"name": "sim", "step_ms": 2}, "max_running": 1}
    engine = AsyncEngine.launch(EngineConfig.model_validate(fields), in_process=True)

    async def main() -> tuple[dict[str, float], dict[str, float]]:
        async with client(OpenAIFrontend().app(engine)) as http:
            tasks = [
                asyncio.create_task(http.post("/v1/completions", json={**GOOD, "max_tokens": tokens}))
                for tokens in (1000, 8, 8)
            ]
            deadline = time.monotonic() + PATIENCE
            while (busy := await samples(http))['engine_requests_waiting_for{reason="run_slots"}'] != 2:
                assert time.monotonic() < deadline
            assert {(await task).status_code for task in tasks} == {200}
            return busy, await samples(http)

    try:
        busy, now = asyncio.run(main())
    finally:
        engine.shutdown()
    assert (busy["engine_requests_running"], busy["engine_requests_waiting"]) == (1, 2)
    assert (busy["vllm:num_requests_running"], busy["vllm:num_requests_waiting"]) == (1, 2)
    assert busy["vllm:kv_cache_usage_perc"] > 0
    assert sum(now[f'engine_requests_waiting_for{{reason="{why.value}"}}'] for why in Why) == 0
    waits = {name.split('"')[1]: value for name, value in now.items() if name.startswith("engine_queue_seconds_count")}
    assert waits == {"none": 1, "run_slots": 2}
    assert now['engine_queue_seconds_sum{reason="run_slots"}'] > now['engine_queue_seconds_sum{reason="none"}']


def test_every_http_request_is_counted_with_its_status(start: Any) -> None:
    server = start("--executor", "sim", "--executor.step-ms", "2")
    for body in (GOOD, GOOD, {**GOOD, "max_tokens": -1}):
        server.http.post("/v1/completions", json=body)
    server.http.get("/nowhere/at/all")
    server.http.get("/v1/models/other")
    with server.http.stream("POST", "/v1/completions", json={**GOOD, "max_tokens": 8000, "stream": True}) as answer:
        next(answer.iter_raw())
    left = 'engine_http_requests_total{path="/v1/completions",status="499"}'
    server.until_metric(left, 1)
    now = server.metrics()
    assert now['engine_http_requests_total{path="/v1/completions",status="200"}'] == 2
    assert now['engine_http_requests_total{path="/v1/completions",status="400"}'] == 1
    assert now['engine_http_requests_total{path="unknown",status="404"}'] == 1
    assert now['engine_http_requests_total{path="/v1/models/{name:path}",status="404"}'] == 1
    assert now['engine_requests_ended_total{reason="abort"}'] == 1


def test_what_a_mounted_application_counts_is_its_own() -> None:
    engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": "sim"}), in_process=True)
    one, two = OpenAIFrontend().app(engine), OpenAIFrontend().app(engine)

    async def main() -> tuple[str, str]:
        texts = []
        for app in (one, two):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
                if app is one:
                    assert (await http.post("/v1/completions", json=GOOD)).status_code == 200
                texts.append((await http.get("/metrics")).text)
        return texts[0], texts[1]

    try:
        first, second = asyncio.run(main())
    finally:
        engine.shutdown()
    assert 'path="/v1/completions"' in first
    assert 'path="/v1/completions"' not in second
    assert "engine_requests_accepted_total 1.0" in second  # the engine is the same


def test_tenants_beyond_a_hundred_are_one() -> None:
    engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": "sim"}), in_process=True)

    async def main() -> None:
        asks = [Ask(tokens=[1, 2], tenant=f"t{n % 150}") for n in range(300)]
        group = engine.submit_many(asks)
        group.abort()

    try:
        asyncio.run(main())
        shares = engine.ledger.tenants.shares
    finally:
        engine.shutdown()
    assert len(shares) == 101
    ends: Counter[str] = Counter()
    for share in shares.values():
        ends.update(share.ended)
        assert share.accepted == sum(share.ended.values())
    assert ends == {"abort": 300}
    assert shares["other"].accepted == 100


def test_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    exporting = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs the extra otel"
    )
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from engine.plugins.frontends._tracing import Tracing

    exporter = exporting.InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": "sim"}), in_process=True)
    engine.ledger.closed.append(Tracing(provider).ended)
    app = OpenAIFrontend().app(engine)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
            headers = {"traceparent": parent, "x-request-id": "mine"}
            assert (await http.post("/v1/completions", json=GOOD, headers=headers)).status_code == 200

    try:
        asyncio.run(main())
    finally:
        engine.shutdown()
    [span] = exporter.get_finished_spans()
    assert format(span.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"
    assert [event.name for event in span.events] == ["queued", "started", "first_token"]
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times)
    assert span.attributes["gen_ai.request.id"] == "mine"
    assert span.attributes["gen_ai.usage.completion_tokens"] == 8
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
    provider.shutdown()


def test_traces_without_the_libraries_are_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from engine import ConfigError
    from engine.plugins.frontends._tracing import Tracing

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'sixhooks\[otel\]'"):
        Tracing.to("http://127.0.0.1:1/v1/traces", "x")
