"""How long health takes while large bodies are read and large answers are built: for ``flood.py large`` (case B51)."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

MIB = 2**20
PAUSE = 0.01  # seconds between two looks at health
TURN = {"role": "user", "content": "hi"}
SHORT = {"prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0}
QUICK = -10  # the prober's niceness, where it may have it: its own waiting is not the server's

Address = tuple[str, int]


@dataclass
class Shape:
    """What is asked again and again: where, and with which body."""

    path: str
    body: bytes
    at_once: int = 8


def plain(value: Any) -> bytes:
    """JSON without blanks."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def nested(depth: int) -> Any:
    """A schema so deep."""
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def shapes() -> dict[str, Shape]:
    """Worst bodies within the limit of eight MiB, by name; and requests of few bytes with large answers."""
    done = "/v1/completions"
    chat = "/v1/chat/completions"
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(8000)}}
    schema: Callable[[Any], Any] = lambda one: {  # noqa: E731
        "messages": [TURN], "max_tokens": 1, "response_format": {"type": "json_schema",
                                                                 "json_schema": {"name": "a", "schema": one}}
    }  # fmt: skip
    bodies: dict[str, tuple[str, Any]] = {
        "token ids, too many": (done, {**SHORT, "prompt": [7] * (4 * MIB - 64)}),
        "token ids, a million": (done, {**SHORT, "prompt": [49000] * 1_000_000}),
        "lists of token ids": (done, {**SHORT, "prompt": [[1] * 1000] * 1000}),
        "one string of blanks": (done, {**SHORT, "prompt": " " * (8 * MIB - 200)}),
        "one string of letters": (done, {**SHORT, "prompt": "ab cd " * (8 * MIB // 6 - 40)}),
        "one string of quotes": (done, {**SHORT, "prompt": '"' * (4 * MIB - 100)}),
        "one string of backslashes": (done, {**SHORT, "prompt": "\\" * (4 * MIB - 100)}),
        "one string, no ASCII": (done, {**SHORT, "prompt": "é漢" * (8 * MIB // 5 - 40)}),
        "strings, 130 thousand": (done, {**SHORT, "prompt": ["abcdefgh" * 6] * 130_000}),
        "100 thousand messages": (chat, {"messages": [TURN] * 100_000, "max_tokens": 1}),
        "16 thousand messages": (chat, {"messages": [{**TURN, "content": "x" * 400}] * 16_000, "max_tokens": 1}),
        "16 thousand wrong messages": (chat, {"messages": [{"role": "bob", "content": 1}] * 16_000, "max_tokens": 1}),
        "a deep schema": (chat, schema(nested(400))),
        "a wide schema": (chat, schema(wide)),
        "a schema of eight MiB": (chat, schema({"type": "string", "enum": ["x" * 60] * 120_000})),
        "stop strings": (done, {**SHORT, "stop": ["abcdefgh" * 7] * 130_000}),
        "logit_bias": (done, {**SHORT, "logit_bias": {str(n): 1 for n in range(130_000)}}),
        "metadata": (done, {**SHORT, "metadata": {str(n): "x" * 30 for n in range(130_000)}}),
        "unknown fields": (done, {**SHORT, **{f"field{n}": n for n in range(130_000)}}),
        "tools": (chat, {"messages": [TURN], "tools": [{"type": "function", "function": {"name": f"f{n}"}}
                                                       for n in range(8000)]}),
        "items of responses": ("/v1/responses", {"input": [{"type": "message", "role": "user", "content": "x" * 400}]
                                                 * 16_000}),
        "embeddings, ids": ("/v1/embeddings", {"input": [[1] * 60] * 200}),
        "embeddings, texts": ("/v1/embeddings", {"input": ["hello there " * 40] * 200}),
        "embeddings, too many": ("/v1/embeddings", {"input": [[1]] * 16_000}),
        "tokenize": ("/tokenize", {"prompt": "hello there " * 4000, "return_token_strs": True}),
        "tokenize, eight MiB": ("/tokenize", {"prompt": "hello there " * (8 * MIB // 12 - 10)}),
        "detokenize": ("/detokenize", {"tokens": [1000] * 1_000_000}),
        "render": (done + "/render", {"prompt": [[5] * 500] * 240}),
        "echo with logprobs": (done, {"prompt": list(range(3000)), "logprobs": 20, "echo": True, "max_tokens": 1}),
        "prompt_logprobs": (chat + "", {"messages": [{**TURN, "content": "hello there " * 1500}],
                                        "prompt_logprobs": 20, "max_tokens": 1}),
        "128 choices": (done, {**SHORT, "n": 128, "max_tokens": 400, "logprobs": 19, "ignore_eos": True}),
        "128 choices, streamed": (done, {**SHORT, "n": 128, "max_tokens": 400, "logprobs": 19, "ignore_eos": True,
                                         "stream": True}),
        "many choices of a chat": (chat, {"messages": [TURN], "n": 128, "max_tokens": 400, "logprobs": True,
                                          "top_logprobs": 19, "ignore_eos": True}),
    }  # fmt: skip
    found = {name: Shape(path, plain(body)) for name, (path, body) in bodies.items()}
    found["no JSON"] = Shape(done, b'{"prompt": ' + b"[" * (8 * MIB - 100))
    found["above the limit"] = Shape(done, b" " * (9 * MIB))
    escaped = b'{"max_tokens":1,"prompt":"' + rb"\u00e9" * (8 * MIB // 6 - 10) + b'"}'
    found["one string, escaped"] = Shape(done, escaped)
    assert all(len(shape.body) <= 8 * MIB for name, shape in found.items() if name != "above the limit"), max(
        (len(shape.body), name) for name, shape in found.items()
    )
    return found


def look(address: Address, path: str, over: threading.Event, took: list[float]) -> None:
    """Ask for ``path`` on one connection until it is over."""
    ask = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with socket.create_connection(address, 60) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not over.wait(PAUSE):
            began = time.perf_counter()
            sock.sendall(ask)
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += sock.recv(65536)
            took.append((time.perf_counter() - began) * 1000)


def looker(addresses: dict[str, tuple[Address, str]], pipe: Any) -> None:
    """A process: looks at each address whenever told to, until told to stop, and sends what the answers took."""
    with contextlib.suppress(PermissionError):
        os.nice(QUICK)
    while pipe.recv():
        over = threading.Event()
        took: dict[str, list[float]] = {name: [] for name in addresses}
        threads = [threading.Thread(target=look, args=(*place, over, took[name])) for name, place in addresses.items()]
        for thread in threads:
            thread.start()
        pipe.send(True)
        pipe.recv()
        over.set()
        for thread in threads:
            thread.join()
        pipe.send(took)


class Eyes:
    """Somebody who looks at servers while inside, from a process of its own."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._took: dict[str, list[float]] = {}

    def __enter__(self) -> None:
        self._pipe.send(True)
        self._pipe.recv()

    def __exit__(self, *_: object) -> None:
        self._pipe.send(True)
        self._took = self._pipe.recv()

    def found(self) -> dict[str, float]:
        """Milliseconds of the worst answer and of all but a hundredth, of each server."""
        ranked = {name: sorted(took) or [0.0] for name, took in self._took.items()}
        worst = {name: took[-1] for name, took in ranked.items()}
        return {**worst, **{f"{name}_p99": took[int(0.99 * (len(took) - 1))] for name, took in ranked.items()}}


@contextlib.contextmanager
def looking(addresses: dict[str, tuple[Address, str]]) -> Iterator[Eyes]:
    """Somebody who looks at these, by name."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=looker, args=(addresses, there))
    process.start()
    try:
        yield Eyes(here)
    finally:
        here.send(False)
        process.join()


BARE = """
import asyncio
class Answers(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
    def data_received(self, data):
        self.transport.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
async def main():
    server = await asyncio.get_running_loop().create_server(Answers, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@contextlib.contextmanager
def bare() -> Iterator[Address]:
    """A server that does nothing else than answer: how long the machine alone takes."""
    process = subprocess.Popen([sys.executable, "-c", BARE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield "127.0.0.1", int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def asked(address: Address, shape: Shape, seconds: float) -> Counter[str]:
    """Ask for so long, from several threads. Returns statuses."""
    seen: Counter[str] = Counter()
    over = time.monotonic() + seconds

    def one() -> None:
        while time.monotonic() < over:
            connection = HTTPConnection(*address, timeout=120)
            try:
                connection.request("POST", shape.path, shape.body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                while answer.read(MIB):
                    pass
                seen[str(answer.status)] += 1
            except OSError as error:
                seen[type(error).__name__] += 1
            finally:
                connection.close()

    threads = [threading.Thread(target=one) for _ in range(shape.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen
