"""Stores opened by hand: KV memory that is just bytes, keys that are numbers, one transfer at a time."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from engine.core import Selection
from engine.core.memory import KVLayout
from engine.core.plan import Transfer
from engine.core.registry import Registry, build

PAGES = 12
LONGEST = 20.0  # seconds after which a test gives up


class Where:
    """Of a connector's start: only the page size is looked at."""

    class limits:
        page_size = 4


@pytest.fixture
def memory():
    """Makes KV memory with random bytes, the same every time."""

    def make(sizes=(48, 16), digest="a" * 32) -> KVLayout:
        rng = np.random.default_rng(0)
        regions = tuple(rng.integers(0, 256, (PAGES, size), dtype=np.uint8) for size in sizes)
        return KVLayout(regions, digest)

    return make


@pytest.fixture
def key():
    return lambda number: number.to_bytes(32, "big")


@pytest.fixture
def opened(tmp_path):
    """Opens stores (by name, or one that was made), and closes them in the end."""
    stores = []

    def make(name, layout, **options):
        if name == "file":
            options = {"root": str(tmp_path), **options}
        store = (
            build(Registry().select("connector", name), Selection(name=name, options=options))
            if isinstance(name, str)
            else name
        )
        stores.append(store)
        store.start(Where)
        store.register(layout)
        return store

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def ask():
    """One transfer, and the event that ends it."""

    def asked(store, kind, keys=(), pages=(), name="t"):
        events = list(store.transfer_kv([Transfer(name, kind, "r", tuple(pages), tuple(keys))]))
        until = time.monotonic() + LONGEST
        while not events and time.monotonic() < until:
            time.sleep(0.001)
            events = list(store.transfer_kv([]))
        (event,) = events
        return event

    return asked


@pytest.fixture
def eventually():
    """Waits until something holds."""

    def wait(what, seconds=LONGEST):
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, "it never came"
            time.sleep(0.005)

    return wait


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@dataclass
class Master:
    """A Mooncake master, which can be stopped and started anew (it knows of nothing then)."""

    port: int = 0
    process: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def run(self) -> None:
        import mooncake

        self.port = self.port or free_port()
        command = [
            str(Path(next(iter(mooncake.__path__))) / "mooncake_master"),
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={free_port()}",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + LONGEST
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < until, "mooncake_master does not come up"
                time.sleep(0.02)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def master():
    """A running master. Where the library does not import, what needs it is skipped."""
    pytest.importorskip("mooncake.store", reason="Mooncake or libibverbs1 is not installed", exc_type=ImportError)
    one = Master()
    one.run()
    yield one
    one.stop()


@dataclass
class RedisServer:
    """A server on a unix socket, which can be stopped and started anew (empty)."""

    folder: str
    process: subprocess.Popen | None = None
    options: tuple[str, ...] = field(default=())

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/redis.sock"

    def run(self, *options: str) -> None:
        import redis

        command = ["redis-server", "--port", "0", "--unixsocket", f"{self.folder}/redis.sock", "--save", ""]
        self.process = subprocess.Popen(
            [*command, "--dir", self.folder, *(options or self.options)], stdout=subprocess.DEVNULL
        )
        until = time.monotonic() + LONGEST
        while True:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return
            except redis.AuthenticationError:
                return
            except redis.ConnectionError:
                assert time.monotonic() < until, "redis-server does not come up"
                time.sleep(0.01)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def redis_server(tmp_path_factory):
    """A running server. Where there is none, or no client library, what needs it is skipped."""
    pytest.importorskip("redis", reason="redis is not installed: pip install 'sixhooks[redis]'")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server = RedisServer(str(tmp_path_factory.mktemp("r")))
    server.run()
    yield server
    server.stop()
