"""States of a server, readiness by progress, draining, and a disk that is full (cases B46, B51)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine import EngineConfig
from engine.core.serve.client import Health
from engine.plugins.frontends._life import Life

LONG = {"prompt": [1, 2, 3], "max_tokens": 8000, "temperature": 0}
GOOD = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
RAISE, SLEEP = 40_001, 40_002  # faulty_executor.py
PATIENCE = 60.0
FAULTS = Path(__file__).parents[2] / "core" / "serve"


def ready(server: Any) -> tuple[int, dict[str, Any]]:
    answer = server.http.get("/health/ready")
    return answer.status_code, answer.json()


def stream(server: Any, body: dict[str, Any], lines: list[str]) -> None:
    url = server if isinstance(server, str) else server.url
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        for line in filter(None, answer.iter_lines()):
            lines.append(line)


def running(server: Any, count: int) -> bool:
    return server.metrics()["engine_requests_running"] == count


def test_a_server_says_that_it_is_starting(start: Any, tmp_path: Path) -> None:
    go = tmp_path / "go"
    server = start("--executor", "faulty_executor:SlowToLoad", until=r"starting +(http://[^/\s]+)",
                   env={"LOAD_WHEN": str(go)})  # fmt: skip
    assert server.http.get("/health/live").status_code == 200
    for path in ("/health/ready", "/health"):
        answer = server.http.get(path)
        assert (answer.status_code, answer.json()["state"], answer.json()["ready"]) == (503, "starting", False)
    early = server.http.post("/v1/completions", json=GOOD)
    assert (early.status_code, early.json()["error"]["code"]) == (503, "starting")
    assert int(early.headers["retry-after"]) >= 1
    assert "listening on" not in server.output
    go.touch()
    server._wait_for(r"listening on (\S+)")
    assert ready(server) == (200, ready(server)[1])
    assert ready(server)[1]["state"] == server.http.get("/v1/engine").json()["state"] == "ready"
    assert server.http.post("/v1/completions", json=GOOD).status_code == 200
    assert server.stop() == 0


def test_a_port_in_use_is_told_before_anything_is_loaded(start: Any, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            [sys.executable, "-c", "from engine.cli import main; main()", "serve", "--port",
             str(taken.getsockname()[1]), "--executor", "faulty_executor:SlowToLoad"],
            capture_output=True, text=True, timeout=PATIENCE,
            env={**os.environ, "LOAD_WHEN": str(tmp_path / "never"), "PYTHONPATH": str(FAULTS)},
        )  # fmt: skip
    assert done.returncode == 2
    assert "cannot listen on" in done.stderr


def test_draining(start: Any) -> None:
    server = start("--executor", "sim", "--executor.step-ms", "5", "--drain-timeout", "60")
    lines: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(stream, server, {**GOOD, "max_tokens": 400}, lines)
        server.until(lambda: running(server, 1), "it runs")
        server.process.send_signal(signal.SIGTERM)
        _, said = server.until(lambda: ready(server)[0] == 503 and ready(server), "it drains")
        assert (said["state"], said["status"], said["open_requests"]) == ("draining", "draining", 1)
        assert server.http.get("/v1/engine").json()["state"] == "draining"
        assert server.metrics()['engine_state{state="draining"}'] == 1
        late = server.http.post("/v1/completions", json=GOOD)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        assert int(late.headers["retry-after"]) >= 1
        assert server.http.get("/health/live").status_code == 200
        last.result()
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.wait() == 0


def test_whoever_does_not_end_in_time_is_told(start: Any) -> None:
    server = start("--executor", "sim", "--executor.step-ms", "5", "--drain-timeout", "0.3")
    lines: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        streamed = pool.submit(stream, server, LONG, lines)
        plain = pool.submit(server.http.post, "/v1/completions", json=LONG)
        server.until(lambda: running(server, 2), "they run")
        server.process.send_signal(signal.SIGTERM)
        streamed.result()
        answer = plain.result()
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert server.wait() == 0
    assert "Traceback" not in server.output


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_second_signal_ends_at_once(start: Any, second: int) -> None:
    server = start("--executor", "sim", "--executor.step-ms", "5", "--drain-timeout", "3600")
    lines: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(stream, server, LONG, lines)
        server.until(lambda: running(server, 1), "it runs")
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: ready(server)[1]["state"] == "draining", "it drains")
        assert server.stop(second) == 0
        assert cut.exception() is None or isinstance(cut.exception(), httpx.RemoteProtocolError)
    assert "data: [DONE]" not in lines
    assert not os.path.exists(f"/proc/{server.core_pid}")


def test_readiness_goes_and_comes_with_progress(start: Any) -> None:
    """A stopped engine process whose watchdog has patience: not ready, alive, and ready again when it goes on. A step
    that takes for ever: not ready either."""
    server = start("--executor", "faulty_executor:FaultyExecutor", "--executor.step-ms", "5", "--heartbeat-timeout",
                   "600", "--progress-timeout", "2", "--frontend.engine-death-grace-s", "0")  # fmt: skip
    lines: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(stream, server, {**GOOD, "max_tokens": 500}, lines)
        server.until(lambda: running(server, 1), "it runs")
        assert ready(server)[0] == 200
        os.kill(server.core_pid, signal.SIGSTOP)
        try:
            _, said = server.until(lambda: ready(server)[0] == 503 and ready(server), "it stalls")
            assert (said["status"], said["state"], said["ready"]) == ("stalled", "ready", False)
            assert said["cause"]
            assert server.http.get("/health").status_code == 503
            assert server.http.get("/health/live").status_code == 200
        finally:
            os.kill(server.core_pid, signal.SIGCONT)
        server.until(lambda: ready(server)[0] == 200, "it goes on")
        going.result()
        assert lines[-1] == "data: [DONE]"
        stuck = pool.submit(server.http.post, "/v1/completions", json={**LONG, "prompt": [SLEEP]})
        said = server.until(lambda: ready(server)[0] == 503 and ready(server)[1], "it stalls")
        assert "no step has brought work forward" in said["cause"]
        scraped = httpx.get(f"{server.url}/metrics", timeout=9)  # Prometheus waits for 10 s
        assert "\nengine_ready 0.0\n" in scraped.text
        assert "engine_requests_running" not in scraped.text  # nobody knows
        os.kill(server.core_pid, signal.SIGKILL)
        assert stuck.result().json()["error"]["code"] == "engine_dead"
    assert server.wait() == 1


def test_killed_engines_requests_end_within_two_seconds(start: Any) -> None:
    server = start("--executor", "sim", "--executor.step-ms", "5", "--frontend.engine-death-grace-s", "3")
    streams: list[list[str]] = [[] for _ in range(5)]
    with ThreadPoolExecutor(10) as pool:
        tasks = [pool.submit(stream, server, LONG, lines) for lines in streams]
        plain = [pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=60) for _ in range(5)]
        server.until(lambda: running(server, 10), "they run")
        os.kill(server.core_pid, signal.SIGKILL)
        deadline = time.monotonic() + 2
        answers = [task.result(max(0.0, deadline - time.monotonic())) for task in [*tasks, *plain]][5:]
    assert [answer.status_code for answer in answers] == [503] * 5
    assert all(json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_dead" for lines in streams)
    code, said = ready(server)
    assert (code, said["state"], said["status"]) == (503, "stopped", "dead")
    now = server.metrics()
    assert (now["engine_up"], now["engine_ready"], now['engine_state{state="stopped"}']) == (0, 0, 1)
    assert now['engine_requests_ended_total{reason="error"}'] == now["engine_requests_accepted_total"] == 10
    assert "engine_requests_running" not in now  # nobody knows: routers must not take it for idle
    assert server.wait() == 1


def test_a_full_disk_for_logs_ends_nothing(launch: Any) -> None:
    """Output and logs of both processes go to a full device, also those of a step that fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [sys.executable, "-c", "from engine.cli import main; main()", "serve", "--port", str(port), "--executor",
             "faulty_executor:FaultyExecutor", "--log-requests", "true", "--executor.step-ms", "2",
             "--drain-timeout", "0.3"],
            stdout=full, stderr=full, env={**os.environ, "PYTHONPATH": str(FAULTS)},
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http:

            def is_ready() -> bool:
                try:
                    return http.get("/health/ready").status_code == 200
                except httpx.TransportError:
                    return False

            launch.until(is_ready, "it listens")
            bad = http.post("/v1/completions", json={**GOOD, "prompt": [RAISE]})
            assert (bad.status_code, bad.json()["error"]["code"]) == (500, "request_failed")
            lines: list[str] = []
            with ThreadPoolExecutor(1) as pool:
                opened = pool.submit(stream, f"http://127.0.0.1:{port}", LONG, lines)
                for _ in range(20):
                    assert http.post("/v1/completions", json=GOOD).status_code == 200
                launch.until(lambda: lines, "the stream goes on")
                process.send_signal(signal.SIGTERM)
                opened.result()
            assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert process.wait(PATIENCE) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_bodies_that_ask_for_too_much_are_refused_quickly(server: Any) -> None:
    accepted = server.metrics()["engine_requests_accepted_total"]
    for body, field in (
        ({**GOOD, "prompt": [[1]] * 100_000}, "body"),
        ({**GOOD, "prompt": ["x"] * 100_000}, "prompt"),
        ({**GOOD, "n": 10**6}, "n"),
        ({**GOOD, "prompt_logprobs": -1}, "prompt_logprobs"),
    ):
        answer = server.http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert server.metrics()["engine_requests_accepted_total"] == accepted


def test_a_megabyte_of_text_does_not_hold_up_health(server: Any) -> None:
    body = {**GOOD, "prompt": "many words and numbers 1 2 3 " * 36_000}
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        looks = 0
        while not large.done():
            assert server.http.get("/health").status_code == 200
            looks += 1
        assert large.result().status_code == 400
    assert looks >= 2  # it was asked, and answered, while the text was tokenised


@pytest.mark.parametrize(("heartbeat", "limit", "patience"), [(5.0, 30.0, 2.5), (600.0, 10.0, 10.0), (3.0, 30.0, 2.0)])
def test_others_are_asked_before_a_silent_engine_is_given_up(heartbeat: float, limit: float, patience: float) -> None:
    """Readiness goes at half of the silence that ends the engine, so that whoever balances load turns to others."""
    engine = SimpleNamespace(
        config=EngineConfig(heartbeat_timeout=heartbeat), health=lambda: Health(True, None, 1, 0.0, silence)
    )
    life = Life(engine, limit)  # type: ignore[arg-type]
    silence = patience - 0.1
    assert life.describe()["ready"]
    silence = patience + 0.1
    assert (life.describe()["ready"], life.describe()["state"]) == (False, "ready")
    assert f"not heard of for {silence:.1f} s" in life.describe()["cause"]
