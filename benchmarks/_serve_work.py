"""Workloads of ``serve.py``, and what is measured of an engine that serves one."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its prompt, how many tokens it wants; it arrives once the first stream has said ``after`` tokens."""

    prompt: list[int]
    output: int
    after: int = 0
    runs: bool = True  # counts for times between tokens


def workload(name: str, seed: int, scale: float = 1.0) -> list[Asked]:
    """W1 to W4; prompts are random tokens, others for each seed, so that every run is cold.

    Args:
        scale: of all lengths; below 1 for a try.
    """
    rng = random.Random(f"{name} {seed}")

    def tokens(count: float) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(max(2, int(count * scale)))]

    def wanted(count: int) -> int:
        return max(2, int(count * scale))

    if name == "W1":
        return [Asked(tokens(rng.randrange(112, 145)), wanted(64)) for _ in range(32)]
    if name == "W2":
        shared = tokens(512)
        return [Asked(shared + tokens(32), wanted(32)) for _ in range(16)]
    if name == "W3":
        return [Asked(tokens(128), wanted(128))]
    if name == "W4":
        running = [Asked(tokens(128), wanted(96)) for _ in range(8)]
        return running + [Asked(tokens(1024), wanted(16), after=wanted(16 * n), runs=False) for n in range(1, 5)]
    raise ValueError(f"there is no workload {name!r}")


WORKLOADS = {
    "W1": "32 prompts of ~128 tokens, 64 out",
    "W2": "16 sharing a prefix of 512, 32 own, 32 out",
    "W3": "one stream, 128 in, 128 out",
    "W4": "8 streams (128 in, 96 out), 4 prompts of 1024 arriving over them",
}


@dataclass(slots=True)
class Record:
    """When each request came, and when each of its tokens did, in seconds."""

    asked: Sequence[Asked]
    came: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[float]] = field(default_factory=dict)
    said: dict[int, list[int]] = field(default_factory=dict)

    def result(self, started: float, ended: float) -> dict[str, Any]:
        """Output tokens a second, and the median and 99th percentile of waiting, in ms; ``None`` where not known."""
        first = [times[0] - self.came[at] for at, times in self.tokens.items()]
        gaps = [b - a for at, times in self.tokens.items() if self.asked[at].runs for a, b in itertools.pairwise(times)]
        total = sum(one.output for one in self.asked)
        return {
            "tokens_per_second": total / (ended - started),
            "seconds": ended - started,
            **{f"ttft_{name}_ms": value for name, value in percentiles(first).items()},
            **{f"itl_{name}_ms": value for name, value in percentiles(gaps).items()},
        }


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """In ms."""
    if not seconds:
        return {"p50": None, "p99": None}
    ordered = sorted(seconds)
    return {
        "p50": statistics.median(ordered) * 1e3,
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
    }
