"""Servers that ``serve.py`` compares: processes that answer ``/v1/completions``, all asked by one client.

Times between tokens are those between events of the stream; a server that sends two tokens in one has one gap less.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _serve_work import Asked, Record

READY = 300.0  # seconds that a server may take to start


class Server:
    """A server, started here and ready.

    Args:
        command: with ``{port}`` where the port belongs.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._model = ""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        self._process = subprocess.Popen(
            [part.format(port=self._port) for part in command],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.about = {"command": " ".join(Path(part).name for part in command)}
        self._wait()

    def serve(self, asked: Sequence[Asked]) -> dict[str, Any]:
        """One run, all requests in streams of their own."""
        return asyncio.run(self._serve(asked))

    def close(self) -> None:
        """End the server."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _wait(self) -> None:
        import httpx

        deadline = time.monotonic() + READY
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=2).status_code == 200:
                    models = httpx.get(f"http://127.0.0.1:{self._port}/v1/models", timeout=2).json()
                    self._model = models["data"][0]["id"]
                    return
            time.sleep(0.2)
        self._log.seek(0)
        last = self._log.read().decode(errors="replace")[-2000:]
        self.close()
        raise SystemExit(f"server did not start: {last}")

    async def _serve(self, asked: Sequence[Asked]) -> dict[str, Any]:
        record = Record(asked)
        said: list[str] = [""] * len(asked)
        lead = 0.0  # events of the first stream: fewer than tokens where some are halves of a character
        news = asyncio.Event()  # it has said something more

        async def one(at: int) -> None:
            nonlocal lead
            while lead < asked[at].after:
                news.clear()
                await news.wait()
            record.came[at] = time.perf_counter()
            times = record.tokens.setdefault(at, [])
            async for event in self._events(asked[at]):
                now = time.perf_counter()
                if event.get("usage") and event["usage"]["completion_tokens"] != asked[at].output:
                    raise SystemExit(f"{event['usage']} where {asked[at].output} tokens were asked for")
                for choice in event["choices"]:
                    said[at] += choice.get("text", "")
                    if not choice.get("finish_reason") or not times:
                        times.append(now)
                if at == 0:
                    lead = len(times)
                    news.set()
            if at == 0:  # nobody waits for more than it says
                lead = math.inf
                news.set()

        started = time.perf_counter()
        await asyncio.gather(*(one(at) for at in range(len(asked))))
        return {**record.result(started, time.perf_counter()), "said": said}

    async def _events(self, wish: Asked) -> AsyncIterator[dict[str, Any]]:
        """Events of one stream. A client library would take a part of the processors that is to be the server's."""
        body = json.dumps({
            "model": self._model, "prompt": wish.prompt, "max_tokens": wish.output, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }).encode()  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        try:
            status = await reader.readline()
            if b" 200 " not in status:
                raise SystemExit(f"{status.decode()} {(await reader.read()).decode()[-500:]}")
            async for line in reader:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
        finally:
            writer.close()


def ours(options: Mapping[str, str], threads: int) -> Server:
    """This engine. Options are flags of ``engine serve``."""
    flags = {"executor.threads": str(threads), **options}
    given = [part for key, value in flags.items() for part in (f"--{key.replace('_', '-')}", value)]
    command = [sys.executable, "-c", "from engine.cli import main; main()", "serve", "--port", "{port}", *given]
    return Server(command)


def vllm(options: Mapping[str, str], threads: int) -> Server:
    """vLLM's server, float32, eager. Options: ``python`` of its environment, ``model``, a directory."""
    command = [
        options.get("python", sys.executable), "-m", "vllm.entrypoints.openai.api_server", "--model", options["model"],
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096",
        "--host", "127.0.0.1", "--port", "{port}",
    ]  # fmt: skip
    return Server(command, {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": str(threads)})


def llama(options: Mapping[str, str], threads: int) -> Server:
    """llama.cpp's server. Options: ``binary``, ``model``, a GGUF file, ``slots`` (32)."""
    command = [
        options["binary"], "-m", options["model"], "-np", options.get("slots", "32"), "-c", "16384", "--kv-unified",
        "-t", str(threads), "-tb", str(threads), "--host", "127.0.0.1", "--port", "{port}", "--no-webui",
    ]  # fmt: skip
    return Server(command)
