"""Real engines on executor ``sim``, each a process of its own, and a proxy in a thread of this one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import uvicorn

from engine.plugins.frontends._server import Server, bind, url_of
from engine.plugins.frontends.openai import OpenAIFrontend
from engine.proxy.fleet import Fleet
from engine.proxy.options import Address, ProxyOptions
from engine.proxy.routes import Routes
from engine.testing.serving import Served

KEY = "engines-only"
SECONDS = 60.0


def waiting_for(what, words, seconds=SECONDS):
    """The first true answer of ``what``; fails rather than wait for ever."""
    until = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < until, words
        time.sleep(0.02)
    return answer


class Engine:
    """An engine that can be stopped, killed and started anew on its port."""

    key = KEY

    def __init__(self, role: str, **fields) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.role, self.fields = role, fields
        self.served: Served | None = None
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60, headers={"authorization": f"Bearer {KEY}"})

    def start(self, executor=None, **fields) -> Engine:
        """Start it; with options of the executor and fields of the configuration that may differ each time."""
        connector = {"name": "local", "lease_seconds": 2.0}
        engine = {
            "executor": {"name": "sim", "step_ms": 5.0, **(executor or {})},
            "role": self.role,
            "connectors": [connector],
            "audit": True,
            **self.fields,
            **fields,
        }
        self.served = Served(OpenAIFrontend, {}, engine=engine, api_key=KEY, port=self.port).listening()
        return self

    def signal(self, number: int) -> None:
        os.kill(self.served.process.pid, number)

    @property
    def alive(self) -> bool:
        return self.served is not None and self.served.process.poll() is None

    def kill(self) -> None:
        """kill -9, and nothing is left."""
        self.served.close()

    def metrics(self) -> dict[str, float]:
        lines = self.http.get("/metrics").raise_for_status().text.splitlines()
        return {name: float(value) for name, value in (li.rsplit(" ", 1) for li in lines if not li.startswith("#"))}

    def idle(self) -> None:
        """Nothing is open, and all pages are back; leases end within their time."""
        self.served.wait_for(f"{self.role}: a request is open", lambda books: not books.open)
        waiting_for(lambda: not self.metrics()["engine_kv_pages_pinned"], f"{self.role}: pages are held")

    def ask(self, **body):
        """The engine alone."""
        return self.http.post("/v1/completions", json=body).raise_for_status().json()

    def close(self) -> None:
        self.http.close()
        if self.alive:
            self.served.close()


class Proxy:
    """A proxy on a port of its own, in a thread."""

    def __init__(self, *, prefill=(), decode=(), ready=True, **options) -> None:
        told = {"poll": 0.1, "peer_timeout": 15.0, "prefill_timeout": 30.0, "backend_api_key": KEY, **options}
        self.options = ProxyOptions(
            prefill=tuple(Address(one.url) for one in prefill), decode=tuple(Address(one.url) for one in decode), **told
        )
        self._server: Server | None = None
        self._sock = bind("127.0.0.1", 0)
        self.url = url_of(self._sock)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="proxy")
        self._thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=60)
        if ready:
            everybody = {one.url for one in (*prefill, *decode)}
            waiting_for(lambda: self.ready() == everybody, f"not ready: {self.health()}")

    async def _serve(self) -> None:
        async with Fleet(self.options) as fleet:
            app = Routes(self.options, fleet).app()
            self._server = Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
            await self._server.serve([self._sock])

    def health(self) -> dict:
        return self.http.get("/health").json()

    def ready(self) -> set[str]:
        said = self.health()
        return {peer["url"] for peer in (*said["prefill"], *said["decode"]) if peer["ready"]}

    def count(self, name: str, **labels) -> float:
        """A metric without its prefix, e.g. ``requests``."""
        inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        text = self.http.get("/metrics").text
        found = re.search(rf"^engine_proxy_{name}(?:_total)?{re.escape('{' + inside + '}')} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def outcomes(self) -> dict[str, float]:
        """How requests ended, those that there were."""
        pairs = re.findall(r'^engine_proxy_requests_total\{outcome="(\w+)"\} (\S+)$', self.http.get("/metrics").text,
                           re.MULTILINE)  # fmt: skip
        return {name: float(value) for name, value in pairs if float(value)}

    def ended(self, outcomes: dict[str, float]) -> None:
        """So many requests ended so; counted when all is said, which is after the client has it."""
        waiting_for(lambda: self.outcomes() == outcomes, f"{self.outcomes()} instead of {outcomes}")

    def ask(self, **body) -> httpx.Response:
        return self.http.post("/v1/completions", json=body)

    def stream(self, **body):
        """A context manager: the response, whose lines come as they do."""
        return self.http.stream("POST", "/v1/completions", json={**body, "stream": True})

    def close(self) -> None:
        self.http.close()
        waiting_for(lambda: self._server is not None, "the proxy has not begun")
        self._server.should_exit = True
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        self._sock.close()


@pytest.fixture(scope="package")
def started():
    """Starts engines, all at once; ends them in the end."""
    engines = []

    def start(*roles, **fields):
        made = [Engine(role, **fields) for role in roles]
        engines.extend(made)
        with ThreadPoolExecutor(len(made)) as pool:
            return list(pool.map(Engine.start, made))

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def wait_for():
    """``wait_for(what, words)``: the first true answer of ``what``."""
    return waiting_for


@pytest.fixture
def proxied():
    """Starts proxies; ends them in the end."""
    proxies = []

    def start(**options) -> Proxy:
        proxies.append(Proxy(**options))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def frozen():
    """``frozen(engine)`` stops its process; it goes on in the end at the latest."""
    stopped = []

    def stop(engine):
        engine.signal(signal.SIGSTOP)
        stopped.append(engine)

    yield stop
    for engine in stopped:
        if engine.alive:
            engine.signal(signal.SIGCONT)
