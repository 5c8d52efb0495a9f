"""When to come again: an estimate from how fast requests have ended of late."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

REMEMBERED = 64  # ends
SHORTEST, LONGEST = 1.0, 60.0  # seconds


class Ends:
    """Remembers when the last requests ended. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=REMEMBERED)

    def add(self) -> None:
        """A request has ended. Mutates."""
        self._ends.append(self._clock())

    def wait_for(self, requests: float) -> float:
        """Seconds in which so many more will have ended, if it goes on like this: between 1 and 60.

        What has not moved for long is not expected to move soon: the time since the last end counts.
        """
        if len(self._ends) < 2:
            return SHORTEST if not self._ends else LONGEST / 4
        a_request = (self._clock() - self._ends[0]) / (len(self._ends) - 1)
        return min(LONGEST, max(SHORTEST, math.ceil(requests) * a_request))
