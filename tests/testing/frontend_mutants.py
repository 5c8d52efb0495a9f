"""Frontends that are broken on purpose, each in one way: the one that `engine plugins new` writes, less something."""

from __future__ import annotations

import asyncio
import socket
import threading

from engine.cli.plugin_new import fill
from engine.cli.plugin_templates import CODE
from engine.core import SamplingParams

exec(compile(fill(CODE["frontend"], {"NAME": "plain", "CLASS": "Plain"}), "template", "exec"), globals())
Plain = globals()["Plain"]


class LeavesAThread(Plain):
    """Counts for ever."""

    def serve(self, engine, **settings):
        """Starts what nobody ends."""
        threading.Thread(target=threading.Event().wait, name="counter", daemon=True).start()
        return super().serve(engine, **settings)


class LeavesASocket(Plain):
    """Opens one more socket, for later."""

    def serve(self, engine, **settings):
        """And forgets it."""
        self.more = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.more.bind(("127.0.0.1", 0))
        return super().serve(engine, **settings)


class DoesNotStop(Plain):
    """Waits for its clients, who are not told."""

    async def _client(self, engine, api_key, reader, writer):
        while True:
            try:
                await super()._client(engine, api_key, reader, writer)
                return
            except asyncio.CancelledError:
                continue


class EndsWithAnotherCode(Plain):
    """A signal is an error, is it not?"""

    def serve(self, engine, **settings):
        """As a shell would say it."""
        return super().serve(engine, **settings) or 143


class FallsOverTheirPort(Plain):
    """Lets everybody see the traceback."""

    def serve(self, engine, *, host, port, api_key=None):
        """OSError, as it comes."""
        if port:
            socket.create_server((host, port))
        return super().serve(engine, host=host, port=port, api_key=api_key)


class MixesThemUp(Plain):
    """Whoever asks at once is answered at once, by what the first one gets."""

    def _wish(self, body):
        wish = super()._wish(body)
        if isinstance(wish["prompt"], list) and len(wish["prompt"]) == 1:
            wish["prompt"] = [1, 2, 3]
        return wish


class NeverEndsAStream(Plain):
    """The last piece is the last."""

    @staticmethod
    async def _event(writer, data):
        if data != "[DONE]":
            await Plain._event(writer, data)


class IgnoresWhoLeaves(Plain):
    """Answers everybody to the end, whoever is there."""

    async def _complete(self, engine, wish, reader, writer):
        params = SamplingParams(max_tokens=wish["max_tokens"], temperature=0)
        await (self._stream if wish.get("stream") else self._whole)(engine.generate(wish["prompt"], params), writer)


class HangsUp(Plain):
    """What is wrong is not worth an answer."""

    async def _client(self, engine, api_key, reader, writer):
        try:
            await self._complete(engine, self._wish((await self._read(reader))[3]), reader, writer)
        except Exception:
            return


class CorrectsThem(Plain):
    """A negative number of tokens must have meant one."""

    def _wish(self, body):
        wish = super()._wish(body)
        wish["max_tokens"] = max(1, wish.get("max_tokens", 1))
        return wish


class LeavesTheDoorOpen(Plain):
    """Has no use for keys."""

    def _authorize(self, headers, api_key):
        pass


class TakesPartOfTheKey(Plain):
    """The beginning will do."""

    def _authorize(self, headers, api_key):
        if not headers.get("authorization", "").startswith(f"Bearer {api_key}"):
            super()._authorize(headers, api_key)


class AlwaysWell(Plain):
    """Is up, therefore all is well."""

    async def _health(self, engine, writer):
        await self._send(writer, 200, {"ok": True})
