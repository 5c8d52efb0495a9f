"""The engine's clock. It stands still while a step is planned, and while one is committed.

So all that is decided in one step is decided at one moment, and whoever decides it anew needs that moment alone.
"""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """Seconds since some moment.

    Args:
        source: where the time comes from.
    """

    __slots__ = ("_held", "read")

    def __init__(self, source: Callable[[], float]) -> None:
        self.read = source  # the time as it runs, also while the clock stands still
        self._held: float | None = None

    def __call__(self) -> float:
        """The time now."""
        return self.read() if self._held is None else self._held

    def hold(self) -> float:
        """Stand still from now on; returns the time. Mutates."""
        self._held = now = self.read()
        return now

    def release(self) -> None:
        """Run again. Mutates."""
        self._held = None
