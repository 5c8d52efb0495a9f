"""A store that failed is left alone for a while: whoever asks is told that nothing is there, and nobody waits."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

FIRST, LONGEST = 0.25, 5.0  # seconds that a store is left alone: after the first failure, and at most


class Unreachable(Exception):
    """The store as a whole cannot be used now, as opposed to one page of it."""


class Health:
    """Whether a store is worth asking. Called from any thread.

    Attribute ``outages``: how often it was left alone, a series of failures counted once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pause = 0.0
        self._until = 0.0
        self.cause = ""
        self.outages = 0

    @property
    def good(self) -> bool:
        """Whether it may be asked now. After a pause one question decides."""
        return not self._pause or time.monotonic() >= self._until

    def failed(self, error: BaseException) -> None:
        """It could not be asked. Told in the log once for a series."""
        self.cause = f"{type(error).__name__}: {error}"
        if not self._pause:
            self.outages += 1
            log.warning("connector %s is left alone for a while: %s", self._name, self.cause)
        self._pause = min(LONGEST, 2 * self._pause or FIRST)
        self._until = time.monotonic() + self._pause

    def worked(self) -> None:
        """It answered."""
        if self._pause:
            log.warning("connector %s answers again", self._name)
        self._pause = 0.0
