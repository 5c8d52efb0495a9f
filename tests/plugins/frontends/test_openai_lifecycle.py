"""Clients that leave, engines that die, servers that are told to stop (cases B46, B48, B49)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engine import AsyncEngine, ConfigError, EngineConfig, EngineError
from engine.plugins.frontends._server import Server
from engine.plugins.frontends.openai import OpenAIFrontend

LONG = {"prompt": [1, 2, 3], "max_tokens": 8000, "temperature": 0}
GOOD = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
RAISE, SLEEP, ROW_ERROR, ESCAPE = 40_001, 40_002, 40_003, 40_004  # faulty_executor.py
PATIENCE = 60.0


def raw(server: Any, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request and read nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


ABORTED = 'engine_requests_ended_total{reason="abort"}'


@pytest.mark.parametrize(
    "body",
    [
        {**LONG, "stream": True},
        LONG,
        {**LONG, "n": 3},
        {**LONG, "n": 3, "stream": True},
        {**LONG, "prompt": [[n] for n in range(5)], "stream": True},
    ],
    ids=["stream", "plain", "plain n=3", "stream n=3", "stream of five prompts"],
)
@pytest.mark.parametrize("how", ["close", "half-close"])
def test_who_leaves_costs_nothing_more(server: Any, body: dict[str, Any], how: str) -> None:
    before = server.idle()
    children = body.get("n", 1) * (len(body["prompt"]) if isinstance(body["prompt"][0], list) else 1)
    connection = raw(server, "/v1/completions", body)
    server.until_metric("engine_requests_running", children)
    if how == "close":
        connection.close()
    else:
        connection.shutdown(socket.SHUT_WR)
    server.until_metric(ABORTED, before[ABORTED] + children)
    after = server.idle()
    connection.close()
    assert after["engine_kv_pages_pinned"] == 0
    assert after["engine_output_tokens_total"] - before["engine_output_tokens_total"] < 7000  # not run to its end


def test_who_leaves_while_queued_costs_nothing(start: Any) -> None:
    server = start("--executor", "sim", "--executor.step-ms", "2", "--max-running", "1")
    first = raw(server, "/v1/completions", {**LONG, "stream": True})
    server.until_metric("engine_requests_running", 1)
    queued = [raw(server, "/v1/completions", {**LONG, "stream": stream}) for stream in (True, False)]
    server.until_metric("engine_requests_waiting", 2)
    for connection in queued:
        connection.close()
    server.until_metric("engine_requests_waiting", 0)
    assert server.metrics()[ABORTED] == 2
    first.close()
    assert server.idle()["engine_kv_pages_pinned"] == 0


def test_who_leaves_in_mid_upload_is_no_error_of_ours(start: Any) -> None:
    server = start("--executor", "sim")
    host, port = server.url.removeprefix("http://").split(":")
    for path in ("/v1/completions", "/v1/chat/completions"):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{".encode())
            time.sleep(0.1)
    time.sleep(0.2)
    assert [name for name in server.metrics() if name.startswith("engine_http_errors_total")] == []
    assert server.stop() == 0
    assert "Traceback" not in server.output


def test_finished_requests_are_not_aborted(server: Any) -> None:
    before = server.idle()
    for _ in range(5):
        connection = raw(server, "/v1/completions", GOOD)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.close()
    after = server.idle()
    assert after[ABORTED] == before[ABORTED]
    length = 'engine_requests_ended_total{reason="length"}'
    assert after[length] == before[length] + 5


def test_fifty_streams_leave_at_once(server: Any) -> None:
    before = server.idle()
    connections = [raw(server, "/v1/completions", {**LONG, "prompt": [n], "stream": True}) for n in range(50)]
    server.until_metric("engine_requests_running", 50)
    for connection in connections:
        connection.close()
    server.until_metric(ABORTED, before[ABORTED] + 50)
    after = server.idle()
    ended = {name: value for name, value in after.items() if name.startswith("engine_requests_ended_total")}
    assert sum(ended.values()) == after["engine_requests_accepted_total"]
    assert after["engine_kv_pages_pinned"] == 0


def test_metrics_agree_with_what_clients_saw(start: Any) -> None:
    server = start("--executor", "sim", "--executor.step-ms", "10")
    text = server.http.post("/v1/completions", json={**GOOD, "max_tokens": 20}).json()["choices"][0]["text"]
    bodies = [{**GOOD, "n": 2}, {**GOOD, "prompt": [[1], [2]]}, {**GOOD, "max_tokens": 20, "stop": text[10:12]}]
    usages = [server.http.post("/v1/completions", json=body).json()["usage"] for body in bodies]
    assert server.http.post("/v1/completions", json={"prompt": ""}).status_code == 400
    now = server.idle()
    assert now["engine_requests_accepted_total"] == 6
    ends = {name.split('"')[1]: n for name, n in now.items() if name.startswith("engine_requests_ended_total")}
    assert ends == {"length": 5, "stop": 1, "abort": 0, "timeout": 0, "error": 0}
    assert now['engine_http_errors_total{status="400"}'] == 1
    assert now["engine_prompt_tokens_total"] == 3 + 2 * 3 + 2 + 3
    # A stop string is met on the client's side: the engine may have made a token or two more by then.
    seen = 20 + sum(usage["completion_tokens"] for usage in usages)
    assert 0 <= now["engine_output_tokens_total"] - seen <= 8
    assert now["engine_time_to_first_token_seconds_count"] == 6
    assert now["engine_request_seconds_count"] == 6
    assert seen - 18 <= now["engine_inter_token_seconds_count"] <= seen - 6  # first tokens that come together have none
    assert now["engine_up"] == 1


# ---- the engine dies


def five_and_five(server: Any, pool: ThreadPoolExecutor) -> list[Any]:
    def plain(n: int) -> str:
        answer = server.http.post("/v1/completions", json={**LONG, "prompt": [n + 1]})
        return f"{answer.status_code} {answer.text}"

    def stream(n: int) -> str:
        with server.http.stream("POST", "/v1/completions", json={**LONG, "prompt": [n + 1], "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        return lines[-1]

    tasks = [pool.submit(stream if n % 2 else plain, n) for n in range(10)]
    server.until_metric("engine_requests_running", 10)
    return tasks


def check_all_ended(server: Any, tasks: list[Any], status: int, code: str) -> None:
    ends = [task.result(PATIENCE) for task in tasks]
    for n, end in enumerate(ends[:10]):
        if n % 2 == 0:
            assert end.startswith(f"{status} "), end
            assert json.loads(end.removeprefix(f"{status} "))["error"]["code"] == code
        else:
            assert json.loads(end.removeprefix("data: "))["error"]["code"] == code
    assert server.http.get("/version").status_code == 200


def check_dead(server: Any, words: str) -> None:
    health = server.http.get("/health")
    assert health.status_code == 503
    assert words in health.json()["cause"]
    late = server.http.post("/v1/completions", json=GOOD)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
    assert words in late.json()["error"]["message"]
    assert server.metrics()["engine_up"] == 0
    assert server.wait() == 1  # after the grace: a supervisor must see it
    assert re.search(f"error: the engine died: .*{words}", server.output)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_engine_process_killed_or_frozen(start: Any, number: int) -> None:
    server = start("--executor", "sim", "--executor.step-ms", "5", "--heartbeat-timeout", "1.5",
                   "--frontend.engine-death-grace-s", "3")  # fmt: skip
    with ThreadPoolExecutor(10) as pool:
        tasks = five_and_five(server, pool)
        os.kill(server.core_pid, number)
        check_all_ended(server, tasks, 503, "engine_dead")
    check_dead(server, "SIGKILL" if number == signal.SIGKILL else "no sign of life")


@pytest.mark.parametrize("token", [ESCAPE, SLEEP], ids=["escaping exception", "endless step"])
def test_fatal_step(start: Any, token: int) -> None:
    server = start("--executor", "faulty_executor:FaultyExecutor", "--executor.step-ms", "1", "--step-timeout", "1.5",
                   "--frontend.engine-death-grace-s", "3")  # fmt: skip
    with ThreadPoolExecutor(11) as pool:
        tasks = five_and_five(server, pool)
        tasks.append(pool.submit(server.http.post, "/v1/completions", json={**LONG, "prompt": [token]}))
        check_all_ended(server, tasks, 503, "engine_dead")
        assert tasks[-1].result(PATIENCE).status_code == 503
    check_dead(server, "something nobody expected" if token == ESCAPE else "no step has finished")


def test_failing_step_ends_its_requests_and_the_server_goes_on(start: Any) -> None:
    server = start("--executor", "faulty_executor:FaultyExecutor", "--executor.step-ms", "1")
    with ThreadPoolExecutor(11) as pool:
        tasks = five_and_five(server, pool)
        tasks.append(pool.submit(server.http.post, "/v1/completions", json={**LONG, "prompt": [RAISE]}))
        check_all_ended(server, tasks, 500, "request_failed")
        assert "the device fell off" in tasks[-1].result(PATIENCE).text
    bad = server.http.post("/v1/completions", json={**GOOD, "prompt": [ROW_ERROR]})
    assert (bad.status_code, "this row is bad" in bad.text) == (500, True)
    assert server.http.get("/health").status_code == 200
    assert server.http.post("/v1/completions", json=GOOD).status_code == 200
    assert server.idle()["engine_kv_pages_pinned"] == 0
    assert server.stop() == 0


# ---- told to stop


@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_graceful_end(start: Any, number: int, group: bool) -> None:
    """Open requests may finish, the exit code is 0 and the engine's process is gone."""
    server = start("--executor", "sim", "--executor.step-ms", "5", "--drain-timeout", "30", own_group=group)
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(httpx.post, f"{server.url}/v1/completions", json={**GOOD, "max_tokens": 200}, timeout=60)
        server.until_metric("engine_requests_running", 1)
        assert server.stop(number, group=group) == 0
        assert last.result().json()["usage"]["completion_tokens"] == 200
    assert not os.path.exists(f"/proc/{server.core_pid}")
    assert "Traceback" not in server.output


@pytest.mark.parametrize("grace", [0, 0.25, 1])
def test_end_does_not_wait_for_ever(start: Any, grace: float) -> None:
    server = start("--executor", "sim", "--executor.step-ms", "5", "--drain-timeout", str(grace))
    with raw(server, "/v1/completions", {**LONG, "stream": True}):
        server.until_metric("engine_requests_running", 1)
        assert server.stop() == 0


def test_a_server_that_ends_early_says_why(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it listens, and while it serves: nobody claims to be listening, and nobody waits for ever."""
    engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": "sim"}), in_process=True)

    async def never(self: Server, sockets: Any = None) -> None:
        raise RuntimeError("no event loop policy")

    async def broken(self: Server, sockets: Any = None) -> None:
        self.started = True
        await asyncio.sleep(0.05)
        raise RuntimeError("the loop broke")

    async def silent(self: Server, sockets: Any = None) -> None:
        return

    try:
        for serve, words in ((never, "no event loop"), (broken, "the loop broke"), (silent, "before it listened")):
            monkeypatch.setattr(Server, "serve", serve)
            with pytest.raises((RuntimeError, EngineError), match=words):
                OpenAIFrontend().serve(engine, host="127.0.0.1", port=0)
            assert ("listening on" in capsys.readouterr().out) == (serve is broken)
        with pytest.raises(ConfigError, match="empty"):
            OpenAIFrontend().serve(engine, host="127.0.0.1", port=0, api_key="")
    finally:
        engine.shutdown()


def test_in_process_engine_serves_the_same(start: Any, server: Any) -> None:
    other = start("--executor", "sim", "--in-process")
    assert other.core_pid is None
    mine, theirs = (s.http.post("/v1/completions", json=GOOD).json()["choices"] for s in (other, server))
    assert mine == theirs
    assert other.stop() == 0


def test_a_reader_that_takes_nothing_is_let_go(start: Any) -> None:
    server = start("--executor", "sim", "--executor.step-ms", "1", "--frontend.slow-reader-s", "1")
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    data = json.dumps(
        {"prompt": [[n] for n in range(8)], "max_tokens": 7900, "stream": True, "temperature": 0}
    ).encode()
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    )
    server.until_metric(ABORTED, 8)
    assert server.idle()["engine_kv_pages_pinned"] == 0
    assert server.http.get("/health").json()["open_requests"] == 0
    connection.close()
