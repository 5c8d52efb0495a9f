"""What a client and an engine core say to each other. The same structs in a thread and between processes.

Commands go to the core, events come from it. Between processes they travel as msgpack (msgspec), one struct a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from engine.core.errors import InvalidRequest
from engine.core.histograms import Histogram
from engine.core.plan import Delta
from engine.core.pooling import Pooling
from engine.core.protocols import Limits, ModelInfo
from engine.core.request import Finish, SamplingParams


class Add(msgspec.Struct, frozen=True, tag=True):
    """One request. ``request_id`` is the engine's own id, unique for ever; clients' ids never reach the core."""

    request_id: str
    tokens: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    metadata: dict[str, Any] | None = None
    read_cache: bool = True
    write_cache: bool = True
    deadline: float | None = None
    pooling: Pooling | None = None
    cache_ttl: float | None = None


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Requests that belong together: they arrive in one message, so that all are queued or none is."""

    items: list[Add]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these requests now. Unknown and finished ids are fine."""

    request_ids: list[str]
    finish: Finish = Finish.ABORT
    detail: str | None = None


class AskStats(msgspec.Struct, frozen=True, tag=True):
    """Answered with ``Stats`` of the same number, between two steps."""

    number: int


class UpdateWeights(msgspec.Struct, frozen=True, tag=True):
    """Replace weights: see ``EngineCore.update_weights``. ``running`` may also be ``finish``: everything that was
    submitted before ends first, everything after waits. Answered with ``Updated`` of the same number."""

    number: int
    weights: Any
    running: str
    version: str | None = None


class AskDesk(msgspec.Struct, frozen=True, tag=True):
    """``CacheDesk.ask``, ``RecordDesk.ask`` or ``Lens.ask``, between two steps. Answered with ``DeskAnswer`` of the
    same number."""

    number: int
    desk: Literal["cache", "record", "lens"]
    what: str
    options: dict[str, Any]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Stop after the step that runs now."""


Command = Submit | Abort | AskStats | AskDesk | UpdateWeights | Shutdown


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and requests may come."""

    limits: Limits
    model: ModelInfo
    description: dict[str, Any]


class Started(NamedTuple):
    """A request began: after so many seconds, of which the last were spent waiting for ``reason`` (a ``Why``, or
    ``none``)."""

    request_id: str
    waited: float
    reason: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What one step brought, for all requests that had news, and which requests it started for the first time."""

    deltas: list[Delta]
    started: list[Started] = []


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The core refused a request that the client had accepted."""

    request_id: str
    field: str
    message: str
    code: str = "invalid_value"


class Stats(msgspec.Struct, frozen=True, tag=True):
    """The core's counters and gauges at one moment, what it has measured, and what its requests wait for."""

    number: int
    values: dict[str, int | float]
    histograms: dict[str, Histogram] = {}
    waits: dict[str, int] = {}


class DeskAnswer(msgspec.Struct, frozen=True, tag=True):
    """What the desk answered, or the class, the field (of an ``InvalidRequest``) and the words of an error."""

    number: int
    value: dict[str, Any] | None
    kind: str = ""
    field: str = ""
    message: str = ""


class Updated(msgspec.Struct, frozen=True, tag=True):
    """What came of ``UpdateWeights``: the model as it is served now, or the class and the words of an error."""

    number: int
    model: ModelInfo | None
    kind: str = ""
    message: str = ""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The process lives; ``steps`` finished so far, and whether there is work. Sent by a thread of its own.

    ``advanced`` counts the steps that brought work forward.
    """

    steps: int
    busy: bool
    advanced: int = 0


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The core is gone. ``kind`` is the class of the error, ``trace`` its traceback ('' for expected errors)."""

    kind: str
    message: str
    trace: str = ""


Event = Ready | Outputs | Refused | Stats | DeskAnswer | Updated | Heartbeat | Fatal


class Boot(msgspec.Struct, frozen=True):
    """First line on the child's standard input: where to meet, and the configuration (which may hold secrets)."""

    endpoint_commands: str
    endpoint_events: str
    directory: str
    config: dict[str, Any]


class _Name(msgspec.Struct):
    request_id: str


class _Named(msgspec.Struct):
    """A ``Submit`` of which nothing is believed but the ids."""

    items: list[_Name]


def _plain(value: Any) -> Any:
    """Descriptions hold whatever a plugin put there; what msgpack does not know travels as text."""
    return dict(value) if isinstance(value, Mapping) else str(value)


_command_encoder = msgspec.msgpack.Encoder()  # strict: what a request holds must arrive as it was sent
_event_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """A message as bytes. Raises ``InvalidRequest`` where a command holds what cannot travel."""
    if not isinstance(message, Command):
        return _event_encoder.encode(message)
    try:
        return _command_encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest("request", f"cannot be sent to the engine: {error}") from error


def decode_command(data: bytes) -> Command:
    """The command in ``data``. Raises ``msgspec.DecodeError``."""
    return _commands.decode(data)


def decode_event(data: bytes) -> Event:
    """The event in ``data``. Raises ``msgspec.DecodeError``."""
    return _events.decode(data)


def refusals(data: bytes, error: Exception) -> list[Refused]:
    """Answers to a command that ``decode_command`` refused with ``error``: one for each request that it names."""
    try:
        items = msgspec.msgpack.decode(data, type=_Named).items
    except msgspec.DecodeError:
        return []  # it names none
    return [Refused(item.request_id, "request", f"did not arrive as a request: {error}") for item in items]
