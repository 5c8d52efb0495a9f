"""Garbage collection of a process that serves."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SELDOM = (5_000, 20, 1_000_000)  # objects; a full collection: never by itself
EVERY, AT_LATEST = 30.0, 600.0  # seconds


@contextmanager
def frozen() -> Iterator[None]:
    """What has been loaded by now stays: no collection looks at it. A full one would walk over all of it, for tenths of
    a second, while every row of a batch waits. Mutates the process; at its end all is as it was."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def seldom() -> Iterator[None]:
    """Collections come seldom, full ones from ``Sweep`` alone: each would walk over every list of a large body, and
    the event loop waits meanwhile. Mutates the process; at its end all is as it was."""
    before = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Sweep:
    """Full collections at times when there is little to walk over. Belongs to one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, collect: Callable[[], object] = gc.collect) -> None:
        self._clock, self._collect = clock, collect
        self._last = clock()

    def look(self, *, busy: bool) -> None:
        """Collect, if it is time for it.

        Args:
            busy: there is much in memory now; then it is put off, but not for ever.
        """
        if self._clock() - self._last >= (AT_LATEST if busy else EVERY):
            self._collect()
            self._last = self._clock()
