"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.core.errors import ConfigError, EngineDead, EngineError, InvalidRequest, QueueFull

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
            return HTTPError(400, str(error), param=error.field, code="invalid_value")
        case QueueFull():
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            return HTTPError(429, str(error), "rate_limit_error", code="queue_full", headers=headers)
        case EngineDead():
            return HTTPError(503, f"the engine is not available: {error}", "server_error", code="engine_dead")
        case ConfigError():
            return HTTPError(409, str(error), code="not_available")
        case EngineError():
            return HTTPError(500, str(error), "server_error", code="engine_error")
        case _:
            return HTTPError(500, "internal error", "server_error", code="internal_error")


def failed(detail: str | None) -> HTTPError:
    """A request that the engine gave up on, with its diagnosis."""
    return HTTPError(500, f"the engine could not go on: {detail}", "server_error", code="request_failed")
