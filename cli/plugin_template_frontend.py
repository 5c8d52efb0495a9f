"""The code of a new frontend. ``@WORD@`` is filled in."""

from __future__ import annotations

FRONTEND = '''
"""@NAME@: a frontend. It speaks a part of OpenAI's completions over HTTP, and needs nothing but Python for it."""

import asyncio
import hmac
import json
import signal

from pydantic import Field

from engine.core import ConfigError, EngineDead, EngineError, Frontend, InvalidRequest, PluginOptions, QueueFull
from engine.core import SamplingParams

FIELDS = {"prompt", "max_tokens", "temperature", "stream", "model"}


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status, words):
        super().__init__(words)
        self.status = status


class @CLASS@(Frontend):
    """POST /v1/completions (streamed or not) and GET /health; one request a connection."""

    name = "@NAME@"
    requires_api = ">=1.0,<2"

    class Options(PluginOptions):
        max_body_bytes: int = Field(2**20, ge=1, description="largest request body")

    def serve(self, engine, *, host, port, api_key=None):
        """Until SIGINT or SIGTERM. The exit code is 0 only if the engine is well then."""
        return asyncio.run(self._serve(engine, host, port, api_key))

    async def _serve(self, engine, host, port, api_key):
        clients = set()

        async def client(reader, writer):
            clients.add(asyncio.current_task())
            try:
                await self._client(engine, api_key, reader, writer)
            except (OSError, EOFError, asyncio.CancelledError):
                pass  # the client left, or we are told to stop
            finally:
                clients.discard(asyncio.current_task())
                writer.close()

        try:
            server = await asyncio.start_server(client, host, port)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        print(f"listening on http://{host}:{server.sockets[0].getsockname()[1]}", flush=True)
        await stop.wait()
        server.close()
        for task in [*clients]:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return 0 if engine.health().ok else 1

    async def _client(self, engine, api_key, reader, writer):
        """One request and its answer. An error is an answer, too."""
        try:
            method, path, headers, body = await self._read(reader)
            if (method, path) == ("GET", "/health"):
                await self._health(engine, writer)
            elif (method, path) == ("POST", "/v1/completions"):
                self._authorize(headers, api_key)
                await self._complete(engine, self._wish(body), reader, writer)
            else:
                raise Refusal(404, f"nothing is at {method} {path}")
        except (Refusal, EngineError) as error:
            await self._send(writer, self._status(error), self._error(error))

    async def _read(self, reader):
        """Method, path, headers and body."""
        try:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode("latin-1").split("\\r\\n")
            method, path, _ = head[0].split(" ")
            headers = {name.strip().lower(): value.strip() for name, _, value in (h.partition(":") for h in head[1:])}
            length = int(headers.get("content-length", 0))
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise Refusal(400, "not HTTP/1.1") from error
        if not 0 <= length <= self.options.max_body_bytes:
            raise Refusal(413, f"the body is above {self.options.max_body_bytes} bytes")
        return method, path, headers, await reader.readexactly(length)

    def _authorize(self, headers, api_key):
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
            raise Refusal(401, "the API key is missing or wrong")

    def _wish(self, body):
        """The request's fields. What they hold is checked by the engine."""
        try:
            wish = json.loads(body)
        except ValueError as error:
            raise Refusal(400, f"the body is no JSON: {error}") from error
        if not isinstance(wish, dict) or not isinstance(wish.get("prompt"), (str, list)):
            raise Refusal(400, "an object with a prompt (text or token ids) is expected")
        if unknown := wish.keys() - FIELDS:
            raise Refusal(400, f"unknown fields: {', '.join(sorted(unknown))}")
        return wish

    async def _complete(self, engine, wish, reader, writer):
        """Answer, unless the client leaves before: then the request ends with the task that reads its chunks."""
        params = SamplingParams(max_tokens=wish.get("max_tokens", 16), temperature=wish.get("temperature", 1.0))
        chunks = engine.generate(wish["prompt"], params)
        work = asyncio.ensure_future((self._stream if wish.get("stream") else self._whole)(chunks, writer))
        gone = asyncio.ensure_future(reader.read(1))  # nothing more is to come but the end
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, work):
                task.cancel()
        try:
            await work
        finally:
            await chunks.aclose()

    async def _whole(self, chunks, writer):
        parts = [chunk async for chunk in chunks]
        self._check(parts[-1])
        await self._send(writer, 200, self._choice("".join(part.text for part in parts), parts[-1]))

    async def _stream(self, chunks, writer):
        """Server-sent events. The first chunk comes before the head: what is refused is no stream."""
        started = False
        try:
            async for chunk in chunks:
                self._check(chunk)
                if not started:
                    started = True
                    writer.write(self._head(200, "text/event-stream"))
                await self._event(writer, json.dumps(self._choice(chunk.text, chunk)))
            await self._event(writer, "[DONE]")
        except EngineError as error:
            if not started:
                raise
            await self._event(writer, json.dumps(self._error(error)))

    async def _health(self, engine, writer):
        health = engine.health()
        await self._send(writer, 200 if health.ok else 503, {"ok": health.ok, "cause": health.cause})

    # ---- on the wire

    @staticmethod
    def _check(chunk):
        if chunk.finish_reason == "error":
            raise EngineError(f"the engine could not go on: {chunk.detail}")

    @staticmethod
    def _choice(text, chunk):
        return {"choices": [{"index": 0, "text": text, "finish_reason": chunk.finish_reason}]}

    @staticmethod
    def _error(error):
        return {"error": {"message": str(error)}}

    @staticmethod
    def _status(error):
        known = ((Refusal, getattr(error, "status", 0)), (InvalidRequest, 400), (QueueFull, 429), (EngineDead, 503))
        return next((status for kind, status in known if isinstance(error, kind)), 500)

    @staticmethod
    def _head(status, kind, more=""):
        return f"HTTP/1.1 {status} -\\r\\nContent-Type: {kind}\\r\\n{more}Connection: close\\r\\n\\r\\n".encode()

    async def _send(self, writer, status, body):
        data = json.dumps(body).encode()
        writer.write(self._head(status, "application/json", f"Content-Length: {len(data)}\\r\\n") + data)
        await writer.drain()

    @staticmethod
    async def _event(writer, data):
        writer.write(f"data: {data}\\n\\n".encode())
        await writer.drain()
'''
