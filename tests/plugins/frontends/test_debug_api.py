"""Decisions of a running server, asked over HTTP and by the command line. The engine is a process of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.cli.app import run
from engine.core.record.reading import parse
from engine.core.replay.log import replay

KEY = "secret"
PATIENCE = 60.0


@pytest.fixture(scope="module")
def told(keep: Any) -> Iterator[Any]:
    with keep(
        "--executor", "sim", "--executor.step-ms", "8", "--max-running", "1", "--record", "true", "--num-pages", "64",
        key=KEY,
    ) as server:  # fmt: skip
        yield server


def complete(server: Any, name: str, **fields: Any) -> None:
    body = {"prompt": list(range(40)), "max_tokens": 2, "temperature": 0, **fields}
    server.http.post("/v1/completions", json=body, headers={"x-request-id": name}).raise_for_status()


def command(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run(list(arguments))
    return (int(ended.value.code or 0), *capsys.readouterr())


def test_a_request_that_waits_is_explained_while_it_waits_and_afterwards(told, capsys):
    body = {"prompt": list(range(40)), "max_tokens": 900, "ignore_eos": True, "stream": True}
    with told.http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "long"}) as answer:
        lines = answer.iter_lines()  # closing it would end the request
        next(lines)
        waiting = threading.Thread(target=complete, args=(told, "late"))
        waiting.start()
        said: dict[str, Any] = {}
        until = time.monotonic() + PATIENCE
        while said.get("why") != "run_slots" and time.monotonic() < until:
            found = told.http.get("/debug/requests").json()["requests"]
            said = next((one for one in found if one["state"] == "waiting"), {})
        [late] = told.http.get("/debug/requests/late").json()["requests"]
        assert late["id"] == said["id"]
        assert late["live"]["position"] == 1
        code, out, _ = command(capsys, "explain", "late", told.url, "--api-key", KEY)
        assert code == 0
        assert "place 1 of 1 in the queue" in out
        assert "unblock   one of the 1 that run must end (max_running 1)" in out
    waiting.join()
    [late] = told.http.get("/debug/requests/late").json()["requests"]
    assert late["live"] is None
    assert late["story"]["waits"][0]["why"] == "run_slots"
    assert late["story"]["cached"]["tokens"] == 32
    assert late["story"]["cached"]["missing"]["why"] == "last"
    code, out, _ = command(capsys, "explain", "late", told.url, "--api-key", KEY)
    assert (code, "ended     length" in out) == (0, True)
    code, out, _ = command(capsys, "explain", "late", told.url, "--api-key", KEY, "--json")
    assert json.loads(out)[0]["story"] == late["story"]


def test_the_log_is_downloaded_and_decided_anew(told, capsys, tmp_path):
    complete(told, "x y".replace(" ", "-"), user="somebody")
    answer = told.http.get("/debug/record/log")
    assert answer.headers["content-type"].startswith("application/jsonl")
    log = parse(answer.content)
    assert log.header.whole
    assert replay(log, "downloaded").equal
    assert "somebody" not in answer.text
    file = tmp_path / "evening.jsonl"
    code, out, _ = command(capsys, "record", "write", str(file), told.url, "--api-key", KEY)
    assert (code, out.startswith(f"{file}: ")) == (0, True)
    assert command(capsys, "replay", str(file))[0] == 0
    code, out, _ = command(capsys, "replay", str(file), "--scheduler", "radix")
    assert code == 0
    assert "ttft_mean" in out
    code, out, _ = command(capsys, "explain", "1", str(file))
    assert code == 0
    assert "came      number 1, 40 tokens" in out
    code, _, err = command(capsys, "explain", "nobody", str(file))
    assert (code, "there is no request 'nobody'" in err) == (2, True)
    code, _, err = command(capsys, "record", "write", str(tmp_path), told.url, "--api-key", KEY)
    assert (code, "Is a directory" in err) == (2, True)


def test_the_bodies_are_described(told):
    document = told.http.get("/openapi.json").json()
    body = document["paths"]["/debug/record"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert document["components"]["schemas"][body["$ref"].rpartition("/")[2]]["required"] == ["on"]
    assert document["paths"]["/debug/requests/{request_id}"]["get"]["parameters"][0]["name"] == "request_id"


def test_it_is_switched_while_the_server_runs(told, capsys):
    status = told.http.get("/debug/record").json()
    assert status["on"]
    code, out, _ = command(capsys, "record", "status", told.url, "--api-key", KEY)
    assert (code, status["id"] in out, "from the start of the engine" in out) == (0, True, True)
    assert command(capsys, "record", "off", told.url, "--api-key", KEY)[1] == "decisions are not recorded\n"
    answer = told.http.get("/debug/record/log")
    assert answer.status_code == 409
    assert "engine record on" in answer.json()["error"]["message"]
    assert told.http.get("/debug/requests/late").status_code == 404
    assert told.http.post("/debug/record", json={"on": True}).json()["id"] != status["id"]
    code, out, _ = command(capsys, "record", "on", told.url, "--api-key", KEY, "--json")
    assert json.loads(out)["whole"] is False


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/debug/requests/nobody", None, 404, "'nobody' does not live"),
        ("POST", "/debug/record", {}, 400, "`on`"),
        ("POST", "/debug/record", {"on": True, "folder": "/tmp"}, 400, "folder"),
        ("DELETE", "/debug/record", None, 405, "Method Not Allowed"),
    ],
)
def test_what_cannot_be_asked_is_told(told, method, path, body, status, words):
    answer = told.http.request(method, path, json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/debug/requests", "/debug/requests/x", "/debug/record", "/debug/record/log"])
def test_nothing_is_told_without_the_key(told, path):
    assert httpx.get(told.url + path).status_code == 401
    assert httpx.post(told.url + "/debug/record", json={"on": False}).status_code == 401


def test_logs_are_written_as_decisions_are_made(launch, tmp_path):
    server = launch("--executor", "sim", "--record-dir", str(tmp_path / "logs"), "--num-pages", "64")
    complete(server, "x")
    file = Path(server.http.get("/debug/record").json()["file"])
    assert file.parent == tmp_path / "logs"
    assert server.stop() == 0
    assert replay(parse(file.read_bytes()), "files").steps > 1
