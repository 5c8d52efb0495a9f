"""Is the engine alive, and does it get on? Two separate questions with two separate clocks."""

from __future__ import annotations

import time
from collections.abc import Callable


class Watchdog:
    """Turns heartbeats into a verdict.

    *Liveness*: some heartbeat within ``heartbeat_timeout`` seconds (a killed, stopped or swapped-out process sends
    none). *Progress*: the step counter moves within ``step_timeout`` seconds while there is work (a step that never
    ends still sends heartbeats).
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
        self._beat_at = self._progress_at = self._asked_at = now
        self._steps = 0
        self._busy = False

    def beat(self, steps: int, busy: bool) -> None:
        """The core was heard of."""
        now = self._clock()
        self._beat_at = now
        if steps != self._steps or not busy or not self._busy:
            self._progress_at = now
        self._steps, self._busy = steps, busy

    def verdict(self) -> str | None:
        """``None`` while all is well, else the cause in words."""
        now = self._clock()
        if now - self._asked_at > self.OWN_GAP:
            self._beat_at = self._progress_at = now
        self._asked_at = now
        if now - self._beat_at > self.heartbeat_timeout:
            return f"no sign of life from the engine for {self.heartbeat_timeout:g} s (stopped or starved)"
        if self._busy and now - self._progress_at > self.step_timeout:
            return f"no step has finished for {self.step_timeout:g} s although there is work (step {self._steps + 1})"
        return None
