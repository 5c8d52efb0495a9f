"""Every error that the engine raises on purpose. Each message names the thing at fault and the limit it broke."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class EngineError(Exception):
    """Base of all errors raised on purpose by the engine."""


class ConfigError(EngineError):
    """The configuration cannot be used: an unknown key, a bad value, or limits that contradict each other."""


class PluginError(EngineError):
    """A selected plugin cannot be used. The message names the distribution, the cause and the fix."""


class ModelError(EngineError):
    """The model cannot be found, read or run."""


class InvalidRequest(EngineError, ValueError):
    """A request that is refused before it is queued; nothing else is touched.

    Attributes:
        field: the request's field at fault, e.g. ``max_tokens``.
        message: what is wrong, with the limit.
        code: what kind of fault it is, for programs: ``invalid_value``, ``above_limit``, ``unsupported``,
            ``unknown_field``, ``missing``.
    """

    def __init__(self, field: str, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.code = code


class UnknownRequest(EngineError):
    """A request that is asked about does not live, and is not remembered."""


class QueueFull(EngineError):
    """The bounded queue has no room; try again later.

    Attribute ``retry_after``: in how many seconds there may be room, by the pace of late; ``None`` where nobody knows.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class OutOfPages(EngineError):
    """The page pool was asked for more pages than are free. The core checks first: this is a cache's fault."""


class InvariantViolation(EngineError):
    """Page accounting or a plan broke an invariant. The engine stops rather than serve wrong text."""


class ExecutionError(EngineError):
    """The executor could not run a step: the requests of that step end with an error, the others go on."""


class EngineDead(EngineError):
    """The engine core has stopped (killed, crashed or stalled); the message says why."""


class ShuttingDown(EngineError):
    """The server is about to stop: a request was not begun, or not brought to its end. Try another one."""


class PluginDeprecationWarning(FutureWarning):
    """A plugin uses something of the contract that the next minor version no longer has. Told once a plugin."""


def one_line(error: BaseException, most: int = 300) -> str:
    """``KeyError: 'x'``: an error's class and words in one line of bounded length, whatever its ``str`` does."""
    try:
        words = " ".join(str(error)[: 4 * most].split())
    except Exception:
        words = "(its message cannot be read)"
    return f"{type(error).__name__}: {words}"[:most]


def suggest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'radix'?`` for a near miss, else the list of what there is."""
    options = sorted(known)
    close = get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(options)}" if options else "none is known"
