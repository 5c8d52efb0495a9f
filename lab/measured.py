"""What was measured of requests, simulated or real: times of each, percentiles of all, goodput at an SLO."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ConfigError

GOOD = ("stop", "length")  # ends of requests that were answered
LIMITS = ("ttft", "tpot", "itl", "e2e", "queue")
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Timed:
    """One request. Times are in seconds; ``None``: it never came to that.

    Attributes:
        arrival: since the start.
        queue: from its arrival to its first start.
        ttft: from its arrival to its first token.
        tpot: mean time of a token after the first (its mean inter-token latency).
        itl: 99th percentile of the times between its tokens.
        stall: the longest of them.
        e2e: from its arrival to its end.
        handoff: from the end of its prompt, computed elsewhere, to its start where it is answered.
        late: from its arrival to when the client really sent it; of a simulated one there is none.
        cached: tokens of the prompt that came from the prefix cache at its first start.
        preemptions: how often it lost its pages and started again.
        finish: ``length`` and ``stop``: answered; ``timeout``, ``abort``, ``error`` as the engine says; ``refused``: it
            was not taken; ``skipped``: what it follows was not answered.
        engine, prefill_engine: who answered it, and who computed its prompt where that is another.
    """

    id: str
    tenant: str
    arrival: float
    prompt: int
    output: int
    finish: str
    detail: str | None = None
    queue: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    stall: float | None = None
    e2e: float | None = None
    handoff: float | None = None
    cached: int = 0
    preemptions: int = 0
    engine: str = ""
    prefill_engine: str = ""
    late: float | None = None

    @property
    def answered(self) -> bool:
        """Whether it has all of its answer."""
        return self.finish in GOOD


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits that a request must keep to be worth something: seconds by name, of ``ttft``, ``tpot`` (its mean time
    between tokens), ``itl`` (the 99th percentile of its own), ``e2e`` and ``queue``.

    Source: goodput as in DistServe (Zhong et al., OSDI 2024).
    """

    limits: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> SLO:
        """From ``ttft=1.0,itl=0.05``. Raises ``ConfigError``."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            try:
                seconds = float(value)
                if not equals or name not in LIMITS or not 0 < seconds < float("inf"):
                    raise ValueError
            except ValueError as error:
                raise ConfigError(f"slo {part!r} is no limit such as ttft=1.0 of {', '.join(LIMITS)}") from error
            limits[name] = seconds
        return cls(limits)

    def kept(self, one: Timed) -> bool:
        """Whether the request was answered within all limits. One token has no time between tokens: it keeps those."""
        if not one.answered:
            return False
        return all((value := getattr(one, name)) is None or value <= limit for name, limit in self.limits.items())

    def __str__(self) -> str:
        return ",".join(f"{name}={limit:g}" for name, limit in self.limits.items())


def timed_gaps(times: Sequence[float], tokens: int | None = None) -> tuple[NDArray[np.float32], dict[str, float]]:
    """Gaps between tokens that came at these times, and ``tpot``, ``itl`` and ``stall`` of their request.

    Args:
        tokens: how many came in all, where several could come at one of the times: gaps are then those between times,
            as other load clients count them, and ``tpot`` goes by the tokens.
    """
    if len(times) < 2:
        return np.empty(0, np.float32), {}
    gaps = np.diff(np.asarray(times))
    own = {
        "tpot": (times[-1] - times[0]) / (max(len(times), tokens or 0) - 1),
        "itl": percentile(gaps, 99),
        "stall": float(gaps.max()),
    }
    return gaps.astype(np.float32), own


def percentile(values: NDArray[Any], which: float) -> float:
    """Between the two nearest values. As numpy's, at a tenth of its cost for few values."""
    ordered = np.sort(values)
    place = (len(ordered) - 1) * which / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """Mean, percentiles and the greatest; ``None`` each where there are no values."""
    found = np.fromiter(values, np.float64) if not isinstance(values, np.ndarray) else values
    names = ("mean", *(f"p{which}" for which in PERCENTILES), "max")
    if not len(found):
        return dict.fromkeys(names)
    ordered = np.percentile(found, PERCENTILES)
    return dict(zip(names, map(float, (found.mean(), *ordered, found.max())), strict=True))


def summary(requests: Sequence[Timed], gaps: NDArray[np.float32], seconds: float, slo: SLO) -> dict[str, Any]:
    """All requests together, as plain values. ``itl`` is over the gaps of all.

    Args:
        gaps: between tokens, of all requests.
        seconds: from the first arrival to the last end.
    """
    ends: dict[str, int] = {}
    for one in requests:
        ends[one.finish] = ends.get(one.finish, 0) + 1
    answered = [one for one in requests if one.answered]
    good = sum(slo.kept(one) for one in requests)
    prompts, cached = sum(one.prompt for one in answered), sum(one.cached for one in answered)
    over = {
        name: sum(1 for one in answered if (value := getattr(one, name)) is not None and value > limit)
        for name, limit in slo.limits.items()
    }
    a_second = 1 / seconds if seconds > 0 else 0.0
    return {
        "requests": len(requests),
        "ends": ends,
        "seconds": seconds,
        "requests_per_second": len(answered) * a_second,
        "output_tokens_per_second": sum(one.output for one in requests) * a_second,
        "prompt_tokens_per_second": prompts * a_second,
        "cached_share": cached / prompts if prompts else 0.0,
        "preemptions": sum(one.preemptions for one in requests),
        "slo": {
            "limits": dict(slo.limits), "kept": good, "share": good / len(requests) if requests else 0.0,
            "goodput": good * a_second, "over": over,
        },
        **{
            name: spread(value for one in requests if (value := getattr(one, name)) is not None)
            for name in ("queue", "ttft", "tpot", "stall", "e2e", "handoff", "late")
        },
        "itl": spread(gaps.astype(np.float64)),
    }  # fmt: skip


def write_csv(path: Path, requests: Iterable[Timed]) -> None:
    """One line a request, with a line of names. What is ``None`` is empty."""
    names = [one.name for one in fields(Timed)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(asdict(one) for one in requests)
