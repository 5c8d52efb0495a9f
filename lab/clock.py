"""Time that passes only when somebody says so."""

from __future__ import annotations


class SimulatedClock:
    """Seconds since the start of a simulation. Called, it tells them: an engine's ``clock`` and ``sleep``.

    Attribute ``now``: the time; whoever drives the simulation may set it to a later one.
    """

    __slots__ = ("now",)

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Time passes, and nobody waits. Mutates."""
        self.now += seconds
