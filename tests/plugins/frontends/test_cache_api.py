"""The cache of a running server, asked over HTTP and by ``engine cache``. The engine is a process of its own."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.cli.app import run

KEY = "secret"
PROMPT = list(range(40))


def free_ports() -> tuple[int, int]:
    """Two ports that nobody listens on now."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture(scope="module")
def told(keep: Any) -> Iterator[Any]:
    events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports())
    with keep(
        "--executor", "sim", "--connector", "host", "--audit", "true", "--num-pages", "64", "--cache-events", events,
        "--cache-events-replay", replay, "--cache-events-history", "20", key=KEY,
    ) as server:  # fmt: skip
        yield server


def complete(server: Any, prompt: list[int], **fields: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    server.http.post("/v1/completions", json=body).raise_for_status()


def batches(server: Any, query: str, upto: int) -> list[dict[str, Any]]:
    """What the stream says up to an event's number; an error is the last."""
    found = []
    with server.http.stream("GET", f"/v1/cache/events{query}") as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                found.append(json.loads(line.removeprefix("data: ")))
                if "error" in found[-1] or found[-1]["sequence"] + len(found[-1]["events"]) >= upto:
                    break
    return found


def command(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(["cache", *arguments])
    return (int(ended.value.code or 0), *capsys.readouterr())


# ---- HTTP


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "stats"), ("POST", "explain"), ("POST", "flush"), ("GET", "dump"), ("GET", "snapshot"), ("GET", "events")],
)
def test_every_route_is_guarded(told: Any, method: str, path: str) -> None:
    assert httpx.request(method, f"{told.url}/v1/cache/{path}").status_code == 401


def test_events_are_those_of_the_cache(told: Any) -> None:
    complete(told, PROMPT)
    complete(told, PROMPT, cache_salt="a")
    dump = told.http.get("/v1/cache/dump").json()
    events = [event for batch in batches(told, "?from=0", dump["sequence"]) for event in batch["events"]]
    assert {event["key"] for event in events if event["kind"] == "stored" and event["tier"] == "pool"} == set(
        dump["keys"]
    )
    snapshot = told.http.get("/v1/cache/snapshot").json()
    assert {entry["key"] for entry in snapshot["entries"] if entry["tier"] == "pool"} == set(dump["keys"])
    assert snapshot["page_size"] == 16


def test_a_stream_goes_on_as_things_happen(told: Any) -> None:
    at = told.http.get("/v1/cache/stats").json()["sequence"]
    with told.http.stream("GET", "/v1/cache/events") as answer:
        lines = (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line)
        first = next(lines)
        assert (first["sequence"], first["events"]) == (at, [])
        complete(told, list(range(300, 340)))
        news: list[Any] = []
        while not news:
            news = next(lines)["events"]
        assert {event["kind"] for event in news} == {"stored"}


def test_what_is_too_old_is_said_in_words(told: Any) -> None:
    for n in range(20):  # more events than are kept
        complete(told, [n] * 34)
    answer = told.http.get("/v1/cache/events?from=0")
    assert answer.status_code == 410
    assert answer.json()["error"]["code"] == "too_old"
    assert "take a snapshot" in answer.json()["error"]["message"]


def test_a_flush_ends_a_stream_in_words(told: Any) -> None:
    with told.http.stream("GET", "/v1/cache/events") as answer:
        lines = (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line)
        epoch = next(lines)["epoch"]
        flushed = told.http.post("/v1/cache/flush").json()
        assert flushed["epoch"] != epoch
        *_, last = lines
    assert last["error"]["code"] == "too_old"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("explain", "{}", "prompt"),
        ("explain", '{"prompt": []}', "is empty"),
        ("explain", '{"prompt": [-1]}', "-1"),
        ("explain", '{"prompt": [1], "salt": "x"}', "salt"),
        ("explain", '{"prompt": ', "truncated"),
        ("flush", '{"tiers": 3}', "tiers"),
    ],
)
def test_bad_bodies_are_refused(told: Any, path: str, body: str, words: str) -> None:
    answer = told.http.post(f"/v1/cache/{path}", content=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", ["-1", "x", "9" * 30, "1.5"])
def test_bad_numbers_are_refused(told: Any, number: str) -> None:
    answer = told.http.get(f"/v1/cache/events?from={number}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "from"


def test_the_bodies_are_described(told: Any) -> None:
    document = told.http.get("/openapi.json").json()
    reference = document["paths"]["/v1/cache/explain"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(document["components"]["schemas"][reference["$ref"].rsplit("/", 1)[1]]["properties"]) == {
        "prompt", "cache_salt", "adapter",
    }  # fmt: skip


def test_without_events_there_are_numbers_and_reasons(server: Any) -> None:
    answer = server.http.get("/v1/cache/stats").json()
    assert (answer["epoch"], answer["published"]) == (None, None)
    assert answer["pages"]["total"] == 4096
    assert server.http.post("/v1/cache/explain", json={"prompt": "hello"}).json()["missing"]["why"] == "last"
    for path in ("events", "snapshot", "dump"):
        refused = server.http.get(f"/v1/cache/{path}")
        assert refused.status_code == 409
        assert "--cache-events on" in refused.json()["error"]["message"]


# ---- the command


def test_the_command_tells_numbers_and_reasons(told: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", KEY)
    code, out, _ = command(capsys, "stats", told.url)
    assert code == 0
    assert "64 total" in out
    assert "epoch" in out
    code, out, _ = command(capsys, "stats", told.url, "--json")
    assert json.loads(out)["kvcache"] == "paged"
    complete(told, PROMPT, cache_salt="mine")
    tokens = json.dumps(PROMPT)
    assert command(capsys, "explain", tokens, told.url, "--salt", "mine")[1].startswith("32 of 40 tokens are cached")
    code, out, _ = command(capsys, "explain", tokens, told.url, "--salt", "yours")
    assert "another salt or adapter" in out
    assert command(capsys, "explain", "some text", told.url)[0] == 0
    code, out, _ = command(capsys, "flush", told.url, "--tiers")
    assert code == 0
    assert "tier host:" in out
    assert "forgotten in a flush" in command(capsys, "explain", tokens, told.url, "--salt", "mine")[1]


@pytest.mark.parametrize("way", [[], ["--zmq"]], ids=["http", "zmq"])
def test_the_command_checks_the_events(told: Any, capsys: Any, way: list[str]) -> None:
    complete(told, PROMPT)
    code, out, err = command(capsys, "check", told.url, "--seconds", "1", "--api-key", KEY, "--json", *way)
    assert code == 0, err
    found = json.loads(out)
    assert found["equal"]
    assert found["pages"] > 0


def test_the_command_refuses_in_words(told: Any, server: Any, capsys: Any) -> None:
    for arguments, words in (
        (["stats", told.url], "an API key is required"),
        (["stats", told.url, "--api-key", "other"], "the API key is wrong"),
        (["stats", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["stats", "ftp://there"], "is no URL of a server"),
        (["explain", "[1, true]", told.url], "token ids"),
        (["check", server.url, "--seconds", "0"], "--cache-events on"),
        (["check", server.url, "--zmq"], "publishes no events"),
    ):
        code, _, err = command(capsys, *arguments)
        assert code == 2
        assert words in err
