"""A server of ours, asked over HTTP: JSON in, JSON out, and server-sent events. Standard library only."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from shutil import copyfileobj
from typing import Any
from urllib.parse import urlsplit

from engine.core.errors import EngineError

ANSWER_SECONDS = 60.0
KEY_VARIABLE = "ENGINE_API_KEY"


class HTTPRefused(EngineError):
    """The server has answered with an error; ``status`` and ``code`` are its own."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Server:
    """One server.

    Args:
        url: e.g. ``http://127.0.0.1:8000``.
        api_key: what to send (default: the variable ``ENGINE_API_KEY``, if it is set).

    Raises:
        EngineError: that is no such URL.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url if "//" in url else f"http://{url}"
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError as error:
            raise EngineError(f"{url!r} is no URL of a server: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(f"{url!r} is no URL of a server, such as http://127.0.0.1:8000")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.host, self._port = parts.hostname, port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        key = api_key or os.environ.get(KEY_VARIABLE)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, path: str, body: Any = None) -> Any:
        """The answer to a GET, or to a POST where there is a body.

        Raises:
            HTTPRefused: it is an error. EngineError: there is no server.
        """
        with closing(self._connection()) as connection:
            return json.loads(self._send(connection, path, body).read())

    def text(self, path: str) -> str:
        """The answer to a GET as text. Raises as ``ask``."""
        with closing(self._connection()) as connection:
            return self._send(connection, path, None).read().decode()

    def save(self, path: str, to: Path) -> int:
        """The answer to a GET, into a file. Returns its bytes. Raises as ``ask``, and ``OSError``."""
        with closing(self._connection()) as connection, to.open("wb") as file:
            copyfileobj(self._send(connection, path, None), file)
            return file.tell()

    def events(self, path: str) -> Generator[Any, None, None]:
        """Server-sent events as they come. Closing the iterator leaves. Raises as ``ask``, also in the middle."""
        with closing(self._connection()) as connection:
            answer = self._send(connection, path, None)
            try:
                for line in answer:
                    if line.startswith(b"data: "):
                        event = json.loads(line.removeprefix(b"data: "))
                        if "error" in event:
                            raise refusal(answer.status, event)
                        yield event
            except (OSError, http.client.HTTPException) as error:
                raise EngineError(f"{self.url}: the stream broke off: {error}") from error

    def _connection(self) -> http.client.HTTPConnection:
        return self._kind(self.host, self._port, timeout=ANSWER_SECONDS)

    def _send(self, connection: http.client.HTTPConnection, path: str, body: Any) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            connection.request("GET" if data is None else "POST", self._base + path, data, headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"no server answers at {self.url}: {error or type(error).__name__}") from error
        if answer.status != http.client.OK:
            try:
                raise refusal(answer.status, json.loads(answer.read()))
            except ValueError as error:
                raise HTTPRefused(answer.status, f"{self.url}{path} answered {answer.status}") from error
        return answer


def refusal(status: int, body: Any) -> HTTPRefused:
    """The error that an answer's body tells."""
    told = body.get("error") if isinstance(body, dict) else None
    if not isinstance(told, dict):
        return HTTPRefused(status, f"it answered {status}")
    return HTTPRefused(status, str(told.get("message")), told.get("code"))
