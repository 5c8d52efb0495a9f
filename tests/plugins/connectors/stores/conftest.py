"""Stores opened by hand: KV memory that is just bytes, keys that are numbers, one transfer at a time."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from engine.core import SamplingParams
from engine.core.memory import KVLayout
from engine.core.plan import Transfer
from engine.core.registry import make
from engine.testing import ShadowExecutor, make_core

PAGES = 12
LONGEST = 20.0  # seconds after which a test gives up
PROMPT = [at % 97 for at in range(30)]


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

    def opened_one(name, layout, **options):
        if name == "file":
            options = {"root": str(tmp_path), **options}
        store = make("connector", name, options) if isinstance(name, str) else name
        stores.append(store)
        store.start(Where)
        store.register(layout)
        return store

    yield opened_one
    for store in stores:
        store.close()


@pytest.fixture
def engine_over():
    """Makes engines whose pages tell whose they are, with one store (by name) as their tier; closes them in the end."""
    made = []

    def engine(name, **options):
        made.append(make_core(connectors=[make("connector", name, options)], executor=ShadowExecutor(), num_pages=40))
        return made[-1]

    yield engine
    for one in made:
        one.close()


@pytest.fixture
def answer():
    """Of a request alone: its output, and how much of its prompt came from somewhere."""

    def answered(core, tokens=PROMPT, **more):
        core.kv.reset()
        request = core.add(tokens, SamplingParams(max_tokens=6), **more)
        while core.has_work:
            core.step()
        assert getattr(core.executor, "mismatch", None) is None
        assert core.pool.num_fenced == 0
        assert request.finish == "length"
        return list(request.output), request.cached_tokens

    return answered


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


class Server:
    """A program that tests stop, and start anew: it knows of nothing then."""

    process: subprocess.Popen | None = None

    def begin(self, command, up, **pipes):
        """Start it, and wait until ``up()``."""
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, **pipes)
        until = time.monotonic() + LONGEST
        while not up():
            assert time.monotonic() < until, f"{Path(command[0]).name} does not come up"
            time.sleep(0.01)

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class Master(Server):
    """A Mooncake master."""

    def __init__(self):
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"

    def run(self):
        import mooncake

        command = [
            str(Path(next(iter(mooncake.__path__))) / "mooncake_master"),
            f"--rpc_port={self.port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={free_port()}",
        ]
        self.begin(command, self.up, stderr=subprocess.DEVNULL)

    def up(self):
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


@pytest.fixture
def master():
    """A running master. Where the library does not import, what needs it is skipped."""
    pytest.importorskip("mooncake.store", reason="Mooncake or libibverbs1 is not installed", exc_type=ImportError)
    one = Master()
    one.run()
    yield one
    one.stop()


class RedisServer(Server):
    """A Redis server on a unix socket."""

    def __init__(self, folder):
        self.folder = folder
        self.url = f"unix://{folder}/redis.sock"

    def run(self, *options):
        command = ["redis-server", "--port", "0", "--unixsocket", f"{self.folder}/redis.sock", "--save", ""]
        self.begin([*command, "--dir", self.folder, *options], self.up)

    def up(self):
        import redis

        try:
            with redis.Redis.from_url(self.url) as client:
                client.ping()
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False
        return True


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
