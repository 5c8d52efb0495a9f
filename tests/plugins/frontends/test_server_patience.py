"""Clients that do not send what they announced, or do not read what they asked for; and many who send much at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine import AsyncEngine, EngineConfig
from engine.plugins.frontends._watched import PIECE, pieces_of
from engine.plugins.frontends.openai import OpenAIFrontend, OpenAIOptions

HEAD = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
TEXT = "international\n" * 3500


@pytest.fixture(scope="module")
def impatient(launch: Any) -> Iterator[Any]:
    server = launch("--executor", "sim", "--frontend.slow-reader-s", "1")
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.output


def connected(server: Any, receive_buffer: int | None = None) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect((host, int(port)))
    return sock


def answered(server: Any, path: str, status: int) -> float:
    return float(server.metrics().get(f'engine_http_requests_total{{path="{path}",status="{status}"}}', 0))


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/cache/explain"])
def test_a_body_that_does_not_come_is_not_waited_for(impatient: Any, path: str) -> None:
    with connected(impatient) as sock:
        sock.sendall(HEAD % (path.encode(), 1000) + b'{"prompt": ')
        said = b""
        while piece := sock.recv(65536):  # and the connection is closed
            said += piece
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "body_timeout"
    assert impatient.http.get("/health").status_code == 200


@pytest.mark.model  # its tokenizer
def test_a_large_answer_that_nobody_reads_is_let_go(impatient: Any) -> None:
    """It is megabytes, of which the kernel takes some: the rest does not wait in memory for ever."""
    path = "/v1/completions"
    body = {"prompt": TEXT, "echo": True, "max_tokens": 1, "temperature": 0}
    whole = impatient.http.post(path, json={**body, "n": 32})
    assert whole.status_code == 200
    assert len(whole.content) == int(whole.headers["content-length"]) > 8 * PIECE
    assert {choice["text"][: len(TEXT)] for choice in whole.json()["choices"]} == {TEXT}
    left = answered(impatient, path, 499)
    data = json.dumps({**body, "n": 128}).encode()  # more than the kernel takes
    with connected(impatient, receive_buffer=4096) as sock:
        sock.sendall(HEAD % (path.encode(), len(data)) + data)
        deadline = time.monotonic() + 60
        while answered(impatient, path, 499) == left:
            assert time.monotonic() < deadline, "it is never let go"
            time.sleep(0.1)


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE])
def test_pieces_are_the_whole(size: int, more: bool) -> None:
    body = bytes(number % 251 for number in range(size))
    found = list(pieces_of({"type": "http.response.body", "body": body, "more_body": more}))
    assert b"".join(one["body"] for one in found) == body
    assert all(len(one["body"]) <= PIECE for one in found)
    assert [one.get("more_body", False) for one in found] == [True] * (len(found) - 1) + [more]


@pytest.mark.model  # its chat template
def test_more_bodies_than_memory_has_room_for_are_refused_until_there_is_room() -> None:
    """Sixteen of the largest are held, whoever sends more is told to come again; nothing is left of either."""
    size = 64 * 1024
    engine = AsyncEngine.launch(EngineConfig.model_validate({"executor": "sim"}), in_process=True)
    app = OpenAIFrontend(OpenAIOptions(max_body_bytes=size)).app(engine)

    async def send_body(body: bytes, gate: asyncio.Event | None) -> tuple[int, dict[bytes, bytes], Any]:
        messages = iter([{"type": "http.request", "body": body[:-1], "more_body": True},
                         {"type": "http.request", "body": body[-1:], "more_body": False}])  # fmt: skip
        said: list[Any] = []

        async def receive() -> Any:
            message = next(messages, None)
            if message is None:
                await asyncio.get_running_loop().create_future()
            elif not message["more_body"] and gate is not None:
                await gate.wait()
            return message

        async def send(message: Any) -> None:
            said.append(message)

        scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": [], "query_string": b"", "state": {},
                 "http_version": "1.1", "scheme": "http", "root_path": "", "raw_path": b"/tokenize"}  # fmt: skip
        await app(scope, receive, send)
        return said[0]["status"], dict(said[0]["headers"]), json.loads(b"".join(one["body"] for one in said[1:]))

    async def main() -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "a"}], "prompt": None})
        full = body.encode().ljust(size)
        gate = asyncio.Event()
        held = [asyncio.create_task(send_body(full, gate)) for _ in range(16)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        status, headers, said = await send_body(full, None)
        assert (status, headers[b"retry-after"], said["error"]["code"]) == (503, b"1", "bodies_full")
        gate.set()
        assert {status for status, *_ in await asyncio.gather(*held)} == {200}
        assert (await send_body(full, None))[0] == 200

    try:
        asyncio.run(main())
    finally:
        engine.shutdown()
