"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from engine.core.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    InvalidRequest,
    QueueFull,
    ShuttingDown,
    UnknownRequest,
)
from engine.core.timeouts import QUEUE

RETRY_AFTER_SECONDS = 1


@dataclass
class HTTPError(Exception):
    """An answer other than 200."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """What goes over the wire, as a whole answer or as the last event of a stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def as_http(error: Exception) -> HTTPError:
    """What a client is told about an error of the engine. Anything else is our own fault: 500, without details."""
    match error:
        case HTTPError():
            return error
        case InvalidRequest():
            return HTTPError(400, str(error), param=error.field, code=error.code)
        case QueueFull():
            headers = come_again(error.retry_after)
            return HTTPError(429, str(error), "rate_limit_error", code="queue_full", headers=headers)
        case EngineDead():
            return HTTPError(503, f"the engine is not available: {error}", "server_error", code="engine_dead")
        case ShuttingDown():
            return HTTPError(503, str(error), "server_error", code="shutting_down", headers=come_again(None))
        case UnknownRequest():
            return HTTPError(404, str(error), code="not_found")
        case ConfigError():
            return HTTPError(409, str(error), code="not_available")
        case EngineError():
            return HTTPError(500, str(error), "server_error", code="engine_error")
        case _:
            return HTTPError(500, "internal error", "server_error", code="internal_error")


def come_again(seconds: float | None) -> dict[str, str]:
    """When a client may try again, as a header: whole seconds."""
    return {"Retry-After": str(math.ceil(seconds or RETRY_AFTER_SECONDS))}


def too_late(detail: str | None, retry_after: float) -> HTTPError:
    """A request that ended because its time was over: 503 where it never began, 408 at its own deadline."""
    code, _, words = (detail or "").partition(": ")
    if code == QUEUE:
        return HTTPError(503, words, "server_error", code=QUEUE, headers=come_again(retry_after))
    return HTTPError(408, words, "timeout_error", "deadline_ms", code="deadline_exceeded")


def failed(detail: str | None) -> HTTPError:
    """A request that the engine gave up on, with its diagnosis."""
    return HTTPError(500, f"the engine could not go on: {detail}", "server_error", code="request_failed")
