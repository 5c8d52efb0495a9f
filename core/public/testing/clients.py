"""How a suite talks to a frontend. ``OpenAIClient`` speaks the OpenAI completions protocol; others subclass."""

from __future__ import annotations

import http.client
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

TIMEOUT = 60.0
HOPELESS = 10**9  # no token id, and no length


class Refused(Exception):
    """The frontend has answered with an error, as it should where a request cannot be served."""


class Answer(NamedTuple):
    """A request's answer: its text and why it ended (``length``, ``stop``)."""

    text: str
    finish: str


class FrontendClient(ABC):
    """One client of a frontend. Requests are greedy (temperature 0).

    Args:
        host, port: where it listens.
        api_key: what to authenticate with.

    Attributes:
        timeout: seconds of silence after which it gives up, with ``OSError``.
    """

    timeout = TIMEOUT

    def __init__(self, host: str, port: int, api_key: str | None = None) -> None:
        self.host, self.port, self.api_key = host, port, api_key

    @abstractmethod
    def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """The whole answer to token ids. Raises ``Refused``."""

    @abstractmethod
    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[str]:
        """The pieces of the answer as they come, none after the last. Closing the iterator means leaving.

        Raises ``Refused``, also in the middle.
        """

    @abstractmethod
    def begin(self, prompt: Sequence[int], max_tokens: int) -> Callable[[], None]:
        """Send a request whose answer would come as a whole. What is returned leaves without it."""

    @abstractmethod
    def nonsense(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Bad requests, each with words for it; every one must raise ``Refused``."""

    @abstractmethod
    def vanish(self) -> None:
        """Connect, send half a request, and leave."""

    @abstractmethod
    def healthy(self) -> bool:
        """What the frontend says of its engine; raises ``OSError`` where it says nothing."""


class OpenAIClient(FrontendClient):
    """``POST /v1/completions`` with token ids, ``GET /health``."""

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """One completion."""
        return self._whole(self._wish(prompt, max_tokens))

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[str]:
        """Server-sent events, up to ``[DONE]``."""
        with closing(self._connect()) as connection:
            self._send(connection, {**self._wish(prompt, max_tokens), "stream": True})
            with connection.getresponse() as response:
                if response.status != 200:
                    raise Refused(f"{response.status}: {response.read().decode(errors='replace')}")
                yield from self._pieces(response)

    @staticmethod
    def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            event = json.loads(data) if data else None
            if event is not None and "error" in event:
                raise Refused(str(event["error"]))
            if event is not None:
                yield event["choices"][0]["text"]
        raise Refused("the stream broke off before its end")

    def begin(self, prompt: Sequence[int], max_tokens: int) -> Callable[[], None]:
        """Send, and do not read."""
        connection = self._connect()
        self._send(connection, self._wish(prompt, max_tokens))
        return connection.close

    def nonsense(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """What no server of completions can serve."""
        bodies: list[tuple[str, Any]] = [
            ("a body that is no JSON", b"{nonsense"),
            ("a body that is no object", b"[1]"),
            ("no prompt", {"max_tokens": 3}),
            ("a prompt of the wrong type", {"prompt": {"a": 1}, "max_tokens": 3}),
            ("an empty prompt", self._wish([], 3)),
            ("a token that is not in the vocabulary", self._wish([HOPELESS], 3)),
            ("a negative number of tokens", self._wish([1], -1)),
            ("more tokens than a request may have", self._wish([1], HOPELESS)),
        ]
        for words, body in bodies:
            yield words, partial(self._whole, body)

    def vanish(self) -> None:
        """Announce more than comes."""
        connection = self._connect()
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b'{"prompt": [1')
        connection.close()

    def healthy(self) -> bool:
        """Status 200."""
        with closing(self._connect()) as connection:
            connection.request("GET", "/health", headers=self._authorization())
            with connection.getresponse() as response:
                response.read()
                return response.status == 200

    def _wish(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}

    def _authorization(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)

    def _send(self, connection: http.client.HTTPConnection, body: Any) -> None:
        headers = {"Content-Type": "application/json", **self._authorization()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", "/v1/completions", data, headers)

    def _whole(self, body: Any) -> Answer:
        with closing(self._connect()) as connection:
            self._send(connection, body)
            with connection.getresponse() as response:
                data = response.read()
        if response.status != 200:
            raise Refused(f"{response.status}: {data.decode(errors='replace')}")
        choice = json.loads(data)["choices"][0]
        return Answer(choice["text"], choice["finish_reason"])
