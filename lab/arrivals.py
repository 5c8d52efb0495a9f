"""What arrives at an engine: requests with their times, lengths and shared beginnings. The same for a simulated engine
and for a real one.

A prompt is made of *pieces*: a piece is a seed and a length, and stands for that many made-up tokens, always the same.
Requests whose prompts begin with equal pieces share a prefix.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ConfigError

Numbers = NDArray[np.uint64]

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
MASK = 2**64 - 1


class Piece(NamedTuple):
    """A run of made-up tokens. One that is shorter is a prefix of one that is longer with the same seed."""

    seed: int
    length: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a workload.

    Attributes:
        id: unique in its workload.
        at: when it comes: seconds after the start; of one that follows others, seconds after the last of them ended.
        prompt: its pieces; of one that continues another, what is new.
        output: tokens that it is answered with.
        after: ids of requests that must have ended before.
        continues: id of one of ``after``: the prompt begins with that one's prompt and answer.
        tenant, session: told to policies as metadata.
        priority: smaller is more urgent.
        deadline: seconds from its arrival after which it ends unfinished; ``None``: never.
        max_tokens: what it asks for, where that is more than its output: the answer ends by itself then, and the engine
            cannot know when. 0: it asks for its output.
    """

    id: str
    at: float
    prompt: tuple[Piece, ...]
    output: int
    after: tuple[str, ...] = ()
    continues: str = ""
    tenant: str = ""
    session: str = ""
    priority: int = 0
    deadline: float | None = None
    max_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        """Tokens of its own pieces."""
        return sum(piece.length for piece in self.prompt)

    @property
    def metadata(self) -> dict[str, Any]:
        """What policies are told of it."""
        told = {"tenant": self.tenant, "session": self.session}
        return {name: value for name, value in told.items() if value}


class Workload:
    """Requests in the order in which they come; those that follow others stand after them.

    Args:
        arrivals: the requests. Sorted by time, but for those that follow others, which keep their order.
        name: what it was made from, e.g. ``poisson:rate=8``.

    Raises:
        ConfigError: an id is there twice; a request follows one that does not stand before it, has no prompt, wants no
            output, or comes before the start.
    """

    def __init__(self, arrivals: Iterable[Arrival], name: str = "") -> None:
        given = list(arrivals)
        roots = sorted((one for one in given if not one.after), key=lambda one: one.at)
        self.arrivals = [*roots, *(one for one in given if one.after)]
        self.name = name
        self._check()

    def __len__(self) -> int:
        return len(self.arrivals)

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self.arrivals)

    def faster(self, factor: float) -> Workload:
        """The same requests at ``factor`` times the rate (those that follow others keep their pauses)."""
        if not factor > 0:
            raise ConfigError(f"workload {self.name!r}: a rate times {factor:g}")
        sped = [one if one.after else replace(one, at=one.at / factor) for one in self.arrivals]
        return Workload(sped, self.name)

    def _check(self) -> None:
        seen: set[str] = set()
        for one in self.arrivals:
            if wrong := _wrong(one, seen):
                raise ConfigError(f"workload {self.name!r}, request {one.id!r}: {wrong}")
            seen.add(one.id)


def _wrong(one: Arrival, seen: Container[str]) -> str:
    """What is wrong with a request that comes after those that were seen; empty: nothing."""
    if one.id in seen:
        return "its id is there twice"
    if not 0 <= one.at < float("inf"):
        return f"its time is {one.at!r}"
    if one.new_tokens < 1 and not one.continues:
        return "it has no prompt"
    if one.output < 1:
        return f"it wants {one.output} tokens"
    if 0 < one.max_tokens < one.output:
        return f"it asks for {one.max_tokens} tokens and is answered with {one.output}"
    if one.continues and one.continues not in one.after:
        return f"it continues {one.continues!r}, which it does not follow"
    return next((f"it follows {other!r}, which is not before it" for other in one.after if other not in seen), "")


def together(workloads: Sequence[Workload]) -> Workload:
    """Several workloads at once. With more than one, ids get the number of theirs in front, and so do tenants that
    are not named."""
    if len(workloads) == 1:
        return workloads[0]
    named = []
    for number, workload in enumerate(workloads, 1):
        for one in workload:
            named.append(
                replace(
                    one,
                    id=f"{number}.{one.id}",
                    after=tuple(f"{number}.{other}" for other in one.after),
                    continues=one.continues and f"{number}.{one.continues}",
                    tenant=one.tenant or f"w{number}",
                )
            )
    return Workload(named, " + ".join(workload.name for workload in workloads))


def seed_of(*parts: object) -> int:
    """A number below 2**64 that depends on all parts, the same in every process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def tokens_of(pieces: Sequence[Piece], vocab_size: int, first: int = 0) -> list[int]:
    """The tokens that pieces stand for, from ``first`` up to below ``vocab_size``.

    Source of the numbers: SplitMix64 (Steele et al., OOPSLA 2014), which depends on no library's version.
    """
    if not pieces:
        return []
    bases = np.array([(piece.seed * GOLDEN + FIRST) & MASK for piece in pieces], np.uint64)
    lengths = [piece.length for piece in pieces]
    if len(pieces) == 1:
        places: Numbers = np.arange(lengths[0], dtype=np.uint64)
    else:
        places = np.concatenate([np.arange(length, dtype=np.uint64) for length in lengths])
    x = (places + np.uint64(1)) * np.uint64(GOLDEN) + np.repeat(bases, lengths)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(SECOND)
    x ^= x >> np.uint64(31)
    x = x % np.uint64(vocab_size - first) + np.uint64(first)
    tokens: list[int] = _ids(vocab_size)[x.astype(np.intp)].tolist()
    return tokens


@lru_cache(maxsize=4)
def _ids(vocab_size: int) -> NDArray[np.object_]:
    """All token ids. Lists of tokens have these in common: a number of its own for each would be most of their size."""
    ids = np.empty(vocab_size, object)
    ids[:] = range(vocab_size)
    return ids
