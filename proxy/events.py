"""Server-sent events as bytes: whole ones are passed on as they are."""

from __future__ import annotations

from typing import Any

import msgspec

END = b"\n\n"
DATA = b"data: "
ANNOUNCEMENTS = ("response.created", "response.in_progress")


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
    """The object of one event, which may have a name in a line before it; empty where it has none."""
    text = event.strip()
    try:
        value = msgspec.json.decode(text[text.find(b"\n" + DATA) + 1 :].removeprefix(DATA))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def error_of(said: dict[str, Any]) -> dict[str, Any] | None:
    """The error of an answer or of an event; those of ``/v1/responses`` have it in places of their own."""
    if said.get("type") == "error":
        return said
    error = said.get("error")
    if said.get("type") == "response.failed" and isinstance(said.get("response"), dict):
        error = said["response"].get("error") or {}
    return error if isinstance(error, dict) else None


def is_opening(said: dict[str, Any]) -> bool:
    """Whether an event only announces roles, or a response: streams begin with such, before anything is computed."""
    if said.get("type") in ANNOUNCEMENTS:
        return True
    choices = said.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    return all(_announces(choice) for choice in choices)


def _announces(choice: Any) -> bool:
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
        return False
    return "role" in delta and not any(value for name, value in delta.items() if name != "role")
