"""What the dashboard shows at one moment, from looks through the engine's lens and from the client's own books."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.histograms import Histogram
from engine.core.lens.steps import STEPS, Seen
from engine.core.serve.client import AsyncEngine

POINTS = 120  # of each course over time
RECENT = 20  # looks, over which times to tokens are told


@dataclass(frozen=True)
class Frame:
    """One moment. All of it is bounded, and the same for all who look.

    Attributes:
        life: the server's state, as ``/health`` tells it.
        about: what was chosen, and how large it is.
        look: the lens's newest look; empty before the first.
        steps: the newest steps, the oldest first.
        names: id, tenant and prompt tokens by number, of the requests in the steps' cells.
        courses: values over time by name, one a look, the newest last.
        times: seconds by name: the p50 and p99 of what was lately observed.
    """

    life: Mapping[str, Any]
    about: Mapping[str, Any]
    look: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[Seen] = ()
    names: Mapping[int, tuple[str, str, int]] = field(default_factory=dict)
    courses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    times: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """A number of the engine's; 0 where it has not said it."""
        found: float = self.look.get("values", {}).get(name, 0)
        return found

    def last(self, name: str) -> float:
        """The newest value of a course; 0 before the first."""
        course = self.courses.get(name)
        return course[-1] if course else 0.0


class History:
    """Makes frames of looks that follow each other. Remembers a bounded past."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._steps: deque[Seen] = deque(maxlen=STEPS)
        self._names: dict[int, tuple[str, str, int]] = {}
        self._courses: dict[str, deque[float]] = {}
        self._values: Mapping[str, float] = {}
        self._at = 0.0
        self._look: Mapping[str, Any] = {}
        self._observed: deque[tuple[list[int], list[int]]] = deque(maxlen=RECENT)

    @property
    def step(self) -> int:
        """Number of the newest step that is known."""
        return self._steps[-1].step if self._steps else 0

    def frame(self, life: Mapping[str, Any], look: Mapping[str, Any] | None) -> Frame:
        """The moment of a look; ``None``: the engine did not answer, and what was known stands. Mutates."""
        if look is not None:
            self._take(look)
        return Frame(
            life, self._engine.description, self._look, tuple(self._steps), dict(self._names),
            {name: tuple(course) for name, course in self._courses.items()}, self._times(),
        )  # fmt: skip

    # ---- inside

    def _take(self, look: Mapping[str, Any]) -> None:
        self._look = look
        self._steps.extend(Seen(*one) for one in look["steps"])
        self._names |= {number: tuple(name) for number, name in look["names"].items()}
        used = {cell[1] for seen in self._steps for cell in seen.cells}
        self._names = {number: name for number, name in self._names.items() if number in used}
        values, now = look["values"], time.monotonic()
        if self._values:
            seconds = max(now - self._at, 1e-3)
            grown = {name: values[name] - self._values[name] for name in GROWING}
            self._add("generated", max(0, grown["output_tokens"]) / seconds)
            self._add("computed", max(0, grown["computed_tokens"]) / seconds)
            self._add("steps", max(0, grown["steps"]) / seconds)
            asked = grown["looked_up_tokens"]
            self._add("hits", grown["cached_tokens"] / asked if asked > 0 else self._newest("hits"))
        for name in ("running", "waiting", "pages_pinned", "pages_evictable"):
            self._add(name, values[name])
        self._values, self._at = dict(values), now

    def _newest(self, name: str) -> float:
        course = self._courses.get(name)
        return course[-1] if course else 0.0

    def _add(self, name: str, value: float) -> None:
        self._courses.setdefault(name, deque(maxlen=POINTS)).append(value)

    def _times(self) -> dict[str, tuple[float, float]]:
        times = self._engine.ledger.times
        self._observed.append((list(times.first.counts), list(times.gap.counts)))
        first, gap = self._observed[0]
        found = {"ttft": _lately(times.first, first), "itl": _lately(times.gap, gap)}
        return {name: pair for name, pair in found.items() if pair is not None}


GROWING = ("output_tokens", "computed_tokens", "steps", "looked_up_tokens", "cached_tokens")
"""Counters whose growth is shown."""


def _lately(now: Histogram, before: Sequence[int]) -> tuple[float, float] | None:
    """The p50 and p99 of what was observed since the counts were ``before``; of all, where that is nothing."""
    counts = [count - earlier for count, earlier in zip(now.counts, before, strict=True)]
    counts = counts if any(counts) else now.counts
    return (_quantile(now.bounds, counts, 0.5), _quantile(now.bounds, counts, 0.99)) if any(counts) else None


def _quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Within its bucket, evenly; above the last bound, that bound."""
    wanted, so_far, low = share * sum(counts), 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and so_far + count >= wanted:
            return low + (bound - low) * (wanted - so_far) / count
        so_far, low = so_far + count, bound
    return bounds[-1]
