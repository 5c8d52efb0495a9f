"""Outputs on their way: in messages of bounded size, no more of them than their reader keeps up with, and read so that
an event loop has time for others between them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.core.plan import Delta
from engine.core.serve.messages import Outputs, Started

MOST_WEIGHT = 256  # of one message: some milliseconds to read
PARTS_OF_LOGPROBS = 8  # so many log-probabilities cost as much as a token
MOST_UNTAKEN = 512  # messages: with more of them under way, the core makes no step
TOLD_AFTER = 64  # messages after which a reader says that it has taken them
SLICE_SECONDS = 0.003


def pieces(deltas: Sequence[Delta], started: Sequence[Started]) -> Iterator[Outputs]:
    """What a step brought as messages of bounded size, in order."""
    begin, size, news = 0, 0, list(started)
    for number, delta in enumerate(deltas):
        own = 1 + (_entries(delta.logprobs) + _entries(delta.prompt_logprobs)) // PARTS_OF_LOGPROBS
        if number > begin and size + own > MOST_WEIGHT:
            yield Outputs(list(deltas[begin:number]), news)
            begin, size, news = number, 0, []
        size += own
    if begin < len(deltas) or news:
        yield Outputs(list(deltas[begin:]), news)


def _entries(found: Sequence[Any]) -> int:
    return len(found) * (1 + len(found[0].top)) if found else 0


class Untaken:
    """The sender's count of messages under way. Belongs to one thread."""

    def __init__(self) -> None:
        self._count = 0

    @property
    def full(self) -> bool:
        """Whether the reader is so far behind that more would only fill memory."""
        return self._count >= MOST_UNTAKEN

    def sent(self) -> None:
        """One more is under way. Mutates."""
        self._count += 1

    def taken(self, count: int) -> None:
        """So many have been read. Mutates."""
        self._count -= count


class Inbox:
    """Calls from any thread, made in one event loop in their order: for some milliseconds at a time, then whatever
    else the loop has to do has its turn. Without a loop that runs there is nobody to tell, and they are dropped.

    Args:
        taken: called, in any thread, with how many messages have been read or dropped since it was called last.
    """

    def __init__(self, taken: Callable[[int], None]) -> None:
        self._taken = taken
        self._calls: deque[tuple[bool, Callable[..., None], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awake = False
        self._untold = 0

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The one that calls are made in."""
        return self._loop

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Calls are made in this loop from now on. Mutates."""
        with self._lock:
            self._loop, self._awake = loop, False
            if self._calls:
                self._wake()

    def put(self, call: Callable[..., None], *arguments: Any, counts: bool = False) -> None:
        """Make this call soon. Any thread may ask. Mutates.

        Args:
            counts: it reads one of the messages that are counted.
        """
        with self._lock:
            self._calls.append((counts, call, arguments))
            if not self._awake:
                self._wake()

    def _wake(self) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._make)
                self._awake = True
                return
            except RuntimeError:
                if not self._loop.is_closed():
                    raise
        self._count(sum(counts for counts, *_ in self._calls))
        self._calls.clear()

    def _make(self) -> None:
        """In the loop."""
        loop, until = asyncio.get_running_loop(), time.monotonic() + SLICE_SECONDS
        if loop is not self._loop:
            return  # another one has taken over
        try:
            while self._calls:
                counts, call, arguments = self._calls.popleft()
                self._count(counts)
                call(*arguments)
                if time.monotonic() >= until:
                    break
        finally:
            with self._lock:
                self._awake = bool(self._calls)
                if self._awake:
                    loop.call_soon(self._make)

    def _count(self, more: int) -> None:
        self._untold += more
        if self._untold >= TOLD_AFTER:
            told, self._untold = self._untold, 0
            self._taken(told)
