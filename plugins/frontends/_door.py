"""What stands at a server's address while its model is being loaded: it says that the server is starting."""

from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn
from starlette.types import Receive, Scope, Send

from engine.plugins.frontends._errors import HTTPError, come_again
from engine.plugins.frontends._life import State
from engine.plugins.frontends._wire import json_response

CLOSE_SECONDS = 5.0
LIVE, READY, HEALTH = "/health/live", "/health/ready", "/health"
RETRY_SECONDS = 2


class Door:
    """Answers at a listening socket from a thread of its own, until the server takes the socket over.

    Liveness is 200; everything else 503, health with the state, the rest as an error. Connections that come during the
    hand-over wait in the socket's queue.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        config = uvicorn.Config(_starting, http="h11", log_level="warning", access_log=False, lifespan="off")
        config.load()  # here: what it imports is imported by this thread, while no other one does
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="door", daemon=True)
        self._thread.start()

    def hand_over(self) -> socket.socket:
        """Stop answering. Returns the socket, which listens all the time."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(CLOSE_SECONDS)
        return self._sock

    def close(self) -> None:
        """Stop answering and give back the address."""
        self.hand_over().close()

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._sock.dup()]))


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    words, later = "the model is being loaded", come_again(RETRY_SECONDS)
    if scope["path"] == LIVE:
        answer = json_response({"status": "ok"})
    elif scope["path"] in (HEALTH, READY):
        body = {"status": "starting", "state": State.STARTING.value, "ready": False, "cause": words,
                "open_requests": 0, "stalled_for": 0.0}  # fmt: skip
        answer = json_response(body, 503, later)
    else:
        failure = HTTPError(503, f"the server is starting: {words}", "server_error", code="starting", headers=later)
        answer = json_response(failure.body(), failure.status, failure.headers)
    await answer(scope, receive, send)
