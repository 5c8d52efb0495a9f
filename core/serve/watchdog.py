"""Is the engine alive, and does it get on? Two separate questions with two separate clocks."""

from __future__ import annotations

import time
from collections.abc import Callable


class Watchdog:
    """Turns heartbeats into a verdict.

    *Liveness*: some heartbeat within ``heartbeat_timeout`` seconds (a killed, stopped or swapped-out process sends
    none). *Progress*: the step counter moves within ``step_timeout`` seconds while there is work (a step that never
    ends still sends heartbeats).

    Beside the verdict it says how long nothing has been heard (``silence``) and how long no work has come forward
    (``stall``): what readiness goes by. Any thread may ask for these two.
    """

    # Whoever asks for verdicts asks several times a second; a longer gap means that we ourselves were stopped
    # (a laptop's lid, SIGSTOP): that time counts against nobody.
    OWN_GAP = 2.0

    def __init__(
        self, heartbeat_timeout: float, step_timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.heartbeat_timeout = heartbeat_timeout
        self.step_timeout = step_timeout
        self._clock = clock
        now = clock()
        self._beat_at = self._progress_at = self._advanced_at = self._asked_at = now
        self._steps = self._advanced = 0
        self._busy = False

    @property
    def silence(self) -> float:
        """Seconds since the last sign of life."""
        return self._clock() - self._beat_at

    @property
    def stall(self) -> float:
        """Seconds since work last came forward; 0 while there is none."""
        return self._clock() - self._advanced_at if self._busy else 0.0

    def beat(self, steps: int, busy: bool, advanced: int = 0) -> None:
        """The core was heard of: steps it has finished, whether it has work, how many steps brought work forward."""
        now = self._clock()
        self._beat_at = now
        if steps != self._steps or not busy or not self._busy:
            self._progress_at = now
        if advanced != self._advanced or not busy or not self._busy:
            self._advanced_at = now
        self._steps, self._busy, self._advanced = steps, busy, advanced

    def verdict(self) -> str | None:
        """``None`` while all is well, else the cause in words."""
        now = self._clock()
        if now - self._asked_at > self.OWN_GAP:
            self._beat_at = self._progress_at = self._advanced_at = now
        self._asked_at = now
        if now - self._beat_at > self.heartbeat_timeout:
            return f"no sign of life from the engine for {self.heartbeat_timeout:g} s (stopped or starved)"
        if self._busy and now - self._progress_at > self.step_timeout:
            return f"no step has finished for {self.step_timeout:g} s although there is work (step {self._steps + 1})"
        return None
