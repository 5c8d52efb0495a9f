"""What takes long is done in threads, few at once: whoever asks for health does not wait for it.

All threads share the interpreter's lock, which the event loop must win back after each look at its sockets: from each
thread that computes once, after the interpreter's switch interval or the longest call that does not let go of the lock.
So there are few of them, and what they call works on slices.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from engine.core.outputs import Chunk, Completion
from engine.core.sampling import TokenLogprobs
from engine.core.serve.garbage import frozen, seldom

AT_ONCE = 2  # threads: one more would make the event loop wait longer, and none of them end sooner
MUCH = 500  # log-probabilities: some milliseconds
TEXT = 16  # characters of text cost as much as one of them, where it is read for calls of tools
EACH = 4  # log-probabilities cost as much as a choice that has none
SWITCH_SECONDS = 0.001

T = TypeVar("T")


class Aside:
    """Threads for what takes long, of one interface. Belongs to one event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(AT_ONCE)
        self._building = asyncio.Lock()  # who builds never lets go of the interpreter's: two would wait for each other
        self._under_way = 0

    @property
    def busy(self) -> bool:
        """Whether something large is in the works."""
        return self._under_way > 0

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises. One that nobody waits for any more still counts until it has ended."""
        await self._free.acquire()
        self._under_way += 1
        task = asyncio.ensure_future(asyncio.to_thread(work))
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        finally:
            del task  # an error of it leads here, and so to itself: all that it has seen would stay, for ever nearly

    async def build(self, parts: Sequence[Chunk | Completion], build: Callable[[], T]) -> T:
        """What ``build`` makes of parts of answers: here, where there is little in them, else one at a time."""
        if sum(map(weight, parts)) <= MUCH:
            return build()
        async with self._building:
            return await self.run(build)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._free.release()
        self._under_way -= 1
        if not task.cancelled():
            task.exception()  # it was taken, or nobody waits for it


def weight(part: Chunk | Completion) -> int:
    """How much there is to put into words."""
    return EACH + _count(part.logprobs) + _count(part.prompt_logprobs) + len(part.text) // TEXT


def _count(found: Sequence[TokenLogprobs] | None) -> int:
    return len(found) * (1 + len(found[0].top)) if found else 0


@contextmanager
def quick() -> Iterator[None]:
    """For a process that serves: threads change often, and collections of garbage come seldom and do not look at
    what stays for ever."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with frozen(), seldom():
            yield
    finally:
        sys.setswitchinterval(before)
