"""Real servers: ``engine serve`` in a process of its own, on a free port of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

FAULTS = Path(__file__).parents[2] / "core" / "serve"  # faulty_executor.py
START_SECONDS = 120.0
PATIENCE = 60.0


class Server:
    """A running ``engine serve``."""

    def __init__(
        self,
        *flags: str,
        own_group: bool = False,
        until: str = r"listening on (\S+)",
        env: dict[str, str] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from engine.cli import main; main()", "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=own_group,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, (str(FAULTS), os.environ.get("PYTHONPATH")))),
                **(env or {}),
            },
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for(until)
        pid = re.search(r"^core +process (\d+)", self.output, re.MULTILINE)
        self.core_pid = int(pid[1]) if pid else None
        self.http = httpx.Client(base_url=self.url, timeout=60)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """A stream's events; the last line must be [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def metrics(self) -> dict[str, float]:
        """All samples by name and labels, e.g. ``engine_requests_ended_total{reason="stop"}``."""
        text = self.http.get("/metrics").raise_for_status().text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def idle(self) -> dict[str, float]:
        """The metrics once nothing runs and nothing waits; fails rather than wait for ever."""
        for _ in range(200):
            now = self.metrics()
            if not (now["engine_requests_running"] or now["engine_requests_waiting"]):
                return now
            time.sleep(0.05)
        raise AssertionError(f"still busy: {now}")

    @staticmethod
    def until(holds: Callable[[], Any], what: str) -> Any:
        """What ``holds`` says as soon as it says anything; fails rather than wait for ever."""
        deadline = time.monotonic() + PATIENCE
        while not (found := holds()):
            assert time.monotonic() < deadline, what
            time.sleep(0.02)
        return found

    def until_metric(self, name: str, value: float) -> None:
        """Wait until a sample has this value."""
        self.until(lambda: self.metrics().get(name) == value, f"{name} never was {value}")

    def stop(self, number: int = signal.SIGTERM, *, group: bool = False) -> int:
        """Send a signal, to all its processes (of its ``own_group``) if asked to, and wait for the exit code."""
        self.http.close()
        if self.process.poll() is None:
            (os.killpg if group else os.kill)(self.process.pid, number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(60)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def _wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.output):
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.process.kill()
        self.process.wait()
        raise AssertionError(f"the server did not start:\n{self.output}")


@contextlib.contextmanager
def kept_server(*flags: str, key: str = "") -> Iterator[Server]:
    """A server for several tests, which send the key if it asks for one. Ends with exit code 0."""
    server = Server(*flags, *(["--api-key", key] if key else []))
    if key:
        server.http.headers["authorization"] = f"Bearer {key}"
    try:
        yield server
        assert "Traceback" not in server.output
    finally:
        code = server.stop()
    assert code == 0


@contextlib.contextmanager
def shared_server(*flags: str) -> Iterator[Server]:
    """A server for several tests, which leave it idle. Ends with exit code 0, all pages returned."""
    with kept_server(*flags) as server:
        yield server
        final = server.idle()
        assert final["engine_kv_pages_pinned"] == 0
        assert final["engine_kv_pages_free"] + final["engine_kv_pages_evictable"] == final["engine_kv_pages"]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server without a model, shared by all."""
    with shared_server("--executor", "sim", "--executor.step-ms", "2", "--audit", "true") as server:
        yield server


@pytest.fixture(scope="session")
def share() -> Callable[..., contextlib.AbstractContextManager[Server]]:
    """``shared_server``, for servers that a module's tests share."""
    return shared_server


@pytest.fixture(scope="session")
def keep() -> Callable[..., contextlib.AbstractContextManager[Server]]:
    """``kept_server``, for those that a module's tests need not leave idle."""
    return kept_server


@pytest.fixture(scope="session")
def launch() -> type[Server]:
    """The class, for fixtures that keep a server for longer than one test."""
    return Server


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Starts servers with flags of one's own; those that still run at the end are ended."""
    started: list[Server] = []

    def start(*flags: str, **more: Any) -> Server:
        started.append(Server(*flags, **more))
        return started[-1]

    yield start
    for server in started:
        server.http.close()
        if server.process.poll() is None:
            server.process.kill()
        server.wait()
