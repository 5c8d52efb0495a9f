"""The life of a server: starting, ready, draining, stopped; and whether it gets on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from engine.core.errors import ShuttingDown
from engine.core.serve.client import AsyncEngine

HEARTBEATS_APART = 2.0  # seconds; a silence or a stall that is shorter says nothing


class State(StrEnum):
    """Where a server is in its life."""

    STARTING = "starting"  # the model is being loaded: see ``_door``
    READY = "ready"  # requests are accepted
    DRAINING = "draining"  # it was told to stop: open requests end, new ones are refused
    STOPPED = "stopped"  # the engine is gone


class Life:
    """The state of one server.

    Args:
        limit: seconds without progress, while there is work, after which it is not ready.

    Attributes:
        busy: requests that are being answered now, from their first byte to the last of the answer.
    """

    def __init__(self, engine: AsyncEngine, limit: float) -> None:
        self._engine, self._limit = engine, limit
        # Before it is given up, so that whoever balances load turns to others meanwhile.
        self._most_silence = max(HEARTBEATS_APART, min(limit, engine.config.heartbeat_timeout / 2))
        self._draining = False
        self.busy = 0

    @property
    def state(self) -> State:
        """Where it is."""
        if not self._engine.health().ok:
            return State.STOPPED
        return State.DRAINING if self._draining else State.READY

    def drain(self) -> None:
        """Accept no more requests. Mutates."""
        self._draining = True

    def end_all(self) -> None:
        """The time to drain is over: what is still open ends with an error."""
        self._engine.end_all(ShuttingDown("the server stops, and this request has not ended in time"))

    def check_accepts(self) -> None:
        """Raise ``ShuttingDown`` while it drains."""
        if self._draining:
            raise ShuttingDown("the server is about to stop and takes no new requests: try another one")

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """While inside, one more request is being answered."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    def describe(self) -> dict[str, Any]:
        """``status``: ``ok``, or what keeps it from being ready, with the ``cause``; the state, and what is open."""
        health, state = self._engine.health(), self.state
        status, cause = "ok", None
        if state is State.STOPPED:
            status, cause = "dead", health.cause
        elif health.silence > self._most_silence:
            status, cause = "stalled", f"the engine was not heard of for {health.silence:.1f} s"
        elif health.stall > self._limit:
            status, cause = "stalled", f"no step has brought work forward for {health.stall:.1f} s"
        elif state is State.DRAINING:
            status, cause = "draining", "told to stop: open requests end, new ones are refused"
        return {
            "status": status,
            "state": state.value,
            "ready": status == "ok",
            "cause": cause,
            "open_requests": health.open_requests,
            "stalled_for": round(health.stall, 1) if health.stall > HEARTBEATS_APART else 0.0,
        }
