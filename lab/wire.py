"""HTTP/1.1 for a load client: one write a request, answers as they come, connections used again. Nothing else.

A general client takes a few milliseconds of processor time a request and a quarter a token, which a client that shares
a machine with the server takes from what it measures. What is on the wire is parsed by h11.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

import h11

AT_ONCE = 2**16  # bytes


class Unreachable(Exception):
    """No connection comes about."""


class Broken(Exception):
    """The connection ended before the answer did, or what came is no HTTP."""


class _Open(NamedTuple):
    """A connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    state: h11.Connection


class Wire:
    """Connections to one server. Used in one event loop, and closed in it."""

    def __init__(self, host: str, port: int, *, tls: bool) -> None:
        self._host, self._port = host, port
        self._tls = ssl.create_default_context() if tls else None
        self._idle: list[_Open] = []

    def request(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[h11.Request, bytes]:
        """A POST, made ahead."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        fields = {"Host": f"{host}:{self._port}", **headers, "Content-Length": str(len(body))}
        return h11.Request(method="POST", target=path, headers=[*fields.items()]), body

    @contextlib.asynccontextmanager
    async def send(self, request: tuple[h11.Request, bytes]) -> AsyncIterator[Reply]:
        """Send it; the status has come when this is entered. A connection goes on after an answer that was read to its
        end, and is closed after any other.

        Raises:
            Unreachable, Broken.
        """
        while True:
            used, opened = await self._connection()
            reply = Reply(opened)
            try:
                try:
                    await reply.begin(request)
                except Broken:
                    if used and reply.silent:  # it was closed while nobody used it: that is no answer
                        continue
                    raise
                yield reply
                return
            finally:
                if reply.whole and opened.state.our_state is opened.state.their_state is h11.DONE:
                    opened.state.start_next_cycle()
                    self._idle.append(opened)
                else:
                    opened.writer.transport.abort()

    async def close(self) -> None:
        """Close what is idle."""
        idle, self._idle = self._idle, []
        for one in idle:
            one.writer.close()
        for one in idle:
            with contextlib.suppress(OSError):
                await one.writer.wait_closed()

    async def _connection(self) -> tuple[bool, _Open]:
        """One that was used before, where one is idle and alive, and whether it is."""
        while self._idle:
            one = self._idle.pop()
            if not (one.reader.at_eof() or one.writer.is_closing()):
                return True, one
            one.writer.close()
        try:
            name = self._host if self._tls is not None else None
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, server_hostname=name)
        except OSError as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        return False, _Open(reader, writer, h11.Connection(h11.CLIENT))


class Reply:
    """An answer.

    Attributes:
        status: of HTTP.
        silent: nothing of it has come.
        whole: it was read to its end.
    """

    def __init__(self, opened: _Open) -> None:
        self._opened = opened
        self.status = 0
        self.silent, self.whole = True, False

    async def begin(self, request: tuple[h11.Request, bytes]) -> None:
        """Send the request, wait for the status. Raises ``Broken``."""
        state = self._opened.state
        head, body = request
        parts = (state.send(head), state.send(h11.Data(data=body)), state.send(h11.EndOfMessage()))
        self._opened.writer.write(b"".join(part or b"" for part in parts))
        while not isinstance(event := await self._next(), h11.Response):
            if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                raise Broken("it was no answer")
        self.status = event.status_code

    async def data(self) -> AsyncIterator[bytes]:
        """The body, as it comes. Raises ``Broken``."""
        while not isinstance(event := await self._next(), h11.EndOfMessage | h11.ConnectionClosed):
            if isinstance(event, h11.Data):
                yield bytes(event.data)
        self.whole = True

    async def text(self) -> bytes:
        """All of the body. Raises ``Broken``."""
        return b"".join([part async for part in self.data()])

    async def _next(self) -> object:
        opened = self._opened
        try:
            while (event := opened.state.next_event()) is h11.NEED_DATA:
                came = await opened.reader.read(AT_ONCE)
                self.silent = self.silent and not came
                opened.state.receive_data(came)
        except (OSError, h11.RemoteProtocolError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error
        return event
