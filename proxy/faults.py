"""What engines answer that is no answer: whose fault it is, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import httpx

from engine.proxy.events import content, error_of
from engine.proxy.peers import Peer

BUSY = 429
NOT_THE_CLIENTS = (401, 403, 408, BUSY)  # of 400 to 499: another engine may answer otherwise
DEADLINE, QUEUE = "deadline_exceeded", "queue_timeout"  # codes: the client's own limit has passed; another form of busy


class Answer(NamedTuple):
    """A whole answer of an engine's."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class PeerFailed(Exception):
    """An engine has not done what it was asked for; another may. ``answer``: what it said, if it did."""

    def __init__(self, peer: Peer, words: str, answer: Answer | None = None) -> None:
        super().__init__(f"{peer.side} engine {peer.url} {words}")
        self.peer, self.answer = peer, answer


class PromptRefused(Exception):
    """The prefill engine takes the request for wrong: the other one will say so, in words for the client."""


class DeadlinePassed(Exception):
    """The client's own limit has passed while its prompt was computed: nobody need be asked any more."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(message_of(answer.body))
        self.answer = answer


class PrefillFailed(Exception):
    """Nobody computes the prompt that the decode engine waits for."""


def is_the_clients(status: int) -> bool:
    """Whether the fault is in the request."""
    return 400 <= status < 500 and status not in NOT_THE_CLIENTS


def is_busy(status: int, body: bytes) -> bool:
    """Whether the engine has no room for the request now, which is no fault of its own."""
    return status == BUSY or code_of(body) == QUEUE


def code_of(body: bytes) -> str | None:
    """The kind of an error, of an answer or of an event; ``None`` where it has none."""
    code = (error_of(content(body)) or {}).get("code")
    return code if isinstance(code, str) else None


def message_of(body: bytes) -> str:
    """What an error says, cut to a line."""
    error = error_of(content(body))
    words = error.get("message") if error is not None else body.decode(errors="replace")
    return " ".join(str(words).split())[:300]


def words_of(error: httpx.HTTPError) -> str:
    """What is wrong with a connection."""
    what = "cannot be asked" if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) else "broke off"
    return f"{what}: {str(error) or type(error).__name__}"
