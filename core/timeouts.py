"""When requests end whatever they do: at their own deadline, or when they have waited too long to begin."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.core.request import Request

DEADLINE, QUEUE = "deadline", "queue_timeout"  # what the detail of such an end begins with
SLACK = 64  # entries of ended requests that nobody clears away


class Timeouts:
    """Requests by the time at which they are to end. A step without any costs one comparison.

    Args:
        queue_timeout: seconds that a request may wait to begin; ``None``: as long as it takes.
    """

    def __init__(self, queue_timeout: float | None) -> None:
        self._queue_timeout = queue_timeout
        self._due: list[tuple[float, int, str, Request]] = []  # when, what is unique, why; a heap

    def watch(self, request: Request, live: int) -> None:
        """Remember when a new request is to end, if ever. Mutates.

        Args:
            live: how many requests there are: entries of those that have ended are cleared away at twice as many.
        """
        if request.deadline is not None:
            allowed = request.deadline - request.arrival
            words = f"{DEADLINE}: it had {allowed:g} seconds, and they have passed"
            heapq.heappush(self._due, (request.deadline, 2 * request.arrival_index, words, request))
        if self._queue_timeout is not None:
            words = f"{QUEUE}: it waited for more than {self._queue_timeout:g} seconds to begin"
            when = request.arrival + self._queue_timeout
            heapq.heappush(self._due, (when, 2 * request.arrival_index + 1, words, request))
        if len(self._due) > 4 * live + SLACK:
            self._due = [entry for entry in self._due if not entry[3].finished]
            heapq.heapify(self._due)

    def due(self, now: float) -> Iterator[tuple[Request, str]]:
        """Requests whose time has come, and why they end. Mutates: each is told once."""
        while self._due and self._due[0][0] <= now:
            _, number, words, request = heapq.heappop(self._due)
            waits_to_begin = number % 2
            if not request.finished and not (waits_to_begin and request.started is not None):
                yield request, words
