"""Server-sent events as bytes: whole ones are passed on as they are."""

from __future__ import annotations

from typing import Any

import msgspec

END = b"\n\n"
DATA = b"data: "


class Splitter:
    """Cuts a stream after the last whole event: what breaks off in the middle of one is never passed on."""

    def __init__(self) -> None:
        self.rest = b""

    def whole(self, piece: bytes) -> bytes:
        """All events that are complete now; the rest is kept. Mutates."""
        both = self.rest + piece
        cut = both.rfind(END) + len(END)
        if cut < len(END):
            cut = 0
        self.rest = both[cut:]
        return both[:cut]


def each(events: bytes) -> list[bytes]:
    """Whole events, one by one."""
    return [event + END for event in events.split(END)[:-1]]


def content(event: bytes) -> dict[str, Any]:
    """The object of one event; empty where it has none."""
    try:
        value = msgspec.json.decode(event.strip().removeprefix(DATA))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def is_opening(said: dict[str, Any]) -> bool:
    """Whether an event only announces roles: a chat's stream begins with such, before anything is computed."""
    choices = said.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return all(_announces(choice) for choice in choices)


def _announces(choice: Any) -> bool:
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
        return False
    return "role" in delta and not any(value for name, value in delta.items() if name != "role")
