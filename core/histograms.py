"""Histograms that cost a bisection and two additions an observation, and travel as plain values."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


class Histogram(msgspec.Struct):
    """Counts by bucket. ``counts[i]`` observations were at most ``bounds[i]`` and above the bound before it; the last
    count is of those above all bounds. ``total`` is the sum of all."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float]) -> Histogram:
        """An empty one. ``bounds`` rise."""
        return cls(tuple(bounds), [0] * (len(bounds) + 1))

    @property
    def count(self) -> int:
        """How many observations there were."""
        return sum(self.counts)

    def add(self, value: float, times: int = 1) -> None:
        """Observe a value, so many times. Mutates."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def merge(self, other: Histogram) -> None:
        """Take in another of the same bounds. Mutates."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, observations up to it) of every bucket; the last bound is infinity."""
        so_far, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            so_far += count
            found.append((bound, so_far))
        return found
