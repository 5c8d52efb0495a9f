"""Answers with many log-probabilities are put into words in a thread: nobody else's request waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from engine.core.outputs import Chunk, Completion
from engine.core.sampling import TokenLogprobs

MUCH = 2000  # log-probabilities: some twenty milliseconds

T = TypeVar("T")


async def aside(parts: Sequence[Chunk | Completion], build: Callable[[], T]) -> T:
    """What ``build`` makes of parts of answers."""
    return await asyncio.to_thread(build) if sum(map(_entries, parts)) > MUCH else build()


def _entries(part: Chunk | Completion) -> int:
    return _count(part.logprobs) + _count(part.prompt_logprobs)


def _count(found: Sequence[TokenLogprobs] | None) -> int:
    return len(found) * (1 + len(found[0].top)) if found else 0
