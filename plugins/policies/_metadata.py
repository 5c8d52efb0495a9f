"""What requests say of themselves, read without trust: metadata comes from clients and may be anything."""

from __future__ import annotations

import math

from engine.core.request import Request

MAX_NUMBER = 1e15  # nothing that is measured in tokens or seconds is larger; sums of such numbers stay finite
MAX_TEXT = 40


def number(request: Request, key: str) -> float | None:
    """A finite number of moderate size, also where it came as text (HTTP metadata is text); else ``None``."""
    value = request.metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) and abs(found) <= MAX_NUMBER else None


def label(request: Request, key: str) -> str:
    """A short text that names a group, such as a tenant; the empty text where there is none."""
    value = request.metadata.get(key)
    if isinstance(value, str):
        return value[:128]
    return str(value) if isinstance(value, int) and abs(value) <= MAX_NUMBER else ""


def deadline(request: Request, within: float = 0.0) -> float:
    """When the request is to be done, in seconds on the engine's clock; infinity where nobody says.

    Its own, at which the engine ends it; else what its metadata says: ``deadline`` (absolute) or ``deadline_in``
    (seconds after arrival); else ``within`` (as that; 0: none).
    """
    if request.deadline is not None:
        return request.deadline
    absolute = number(request, "deadline")
    if absolute is not None:
        return absolute
    relative = number(request, "deadline_in")
    if relative is None:
        relative = within or math.inf
    return request.arrival + relative
