"""The highest rate that meets an SLO: doubling until it is missed, then bisection between what was met and missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

from engine.core.errors import ConfigError, EngineError
from engine.lab.measured import SLO
from engine.lab.results import Results

LOST = frozenset({"unreachable"})


class Probe(NamedTuple):
    """One run at one rate: requests a second that came, the share of them that kept the SLO, those a second, and why
    the client's figures are not to be trusted."""

    rate: float
    share: float
    goodput: float
    met: bool
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Search:
    """How to search.

    Args:
        first: the rate to begin with, in requests a second.
        share: of the requests that must keep the SLO.
        precision: the search ends where the lowest rate that missed is at most so much above the highest that met,
            as a share of it.
        most: probes at most.
    """

    first: float = 1.0
    share: float = 0.9
    precision: float = 0.05
    most: int = 20

    def __post_init__(self) -> None:
        if not (self.first > 0 and 0 < self.share <= 1 and self.precision > 0 and self.most > 0):
            raise ConfigError(
                f"a search from {self.first:g}/s for {self.share:g} to {self.precision:g}: all are above 0"
            )


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to.

    Attributes:
        rate: the highest that met the SLO; ``None``: none did.
        missed: the lowest that missed it; ``None``: none did.
        probes: all, in the order in which they were run.
        best: what came of the run at ``rate``.
    """

    rate: float | None
    missed: float | None
    probes: tuple[Probe, ...]
    best: Results | None

    def words(self) -> str:
        """For people."""
        if self.rate is None:
            return f"no rate meets the SLO: {self.missed:.3g} requests/s miss it, too"
        if self.missed is None:
            return f"at least {self.rate:.3g} requests/s meet the SLO: no rate was found that misses it"
        return f"{self.rate:.3g} requests/s meet the SLO, {self.missed:.3g} miss it"

    def plain(self, slo: SLO) -> dict[str, Any]:
        """As plain values."""
        return {
            "rate": self.rate, "missed": self.missed, "probes": [one._asdict() for one in self.probes],
            "best": None if self.best is None else self.best.plain(slo, each=True),
        }  # fmt: skip


def find_rate(
    run: Callable[[float], Results], slo: SLO, search: Search, tell: Callable[[Probe], None] = lambda probe: None
) -> Found:
    """Search the highest rate that meets an SLO. A higher one is taken never to meet what a lower misses.

    A rate that is missed while the client was a bottleneck is tried a second time.

    Args:
        run: a workload at a rate.
        tell: called with each probe.

    Raises:
        ConfigError: the SLO has no limit. EngineError: nobody answered anything.
    """
    if not slo.limits:
        raise ConfigError("a search needs limits to meet: give --slo, e.g. ttft=1.0,itl=0.1")
    probes: list[Probe] = []
    low: float | None = None
    high: float | None = None
    best: Results | None = None
    rate, again = search.first, False
    while len(probes) < search.most:
        results = run(rate)
        if results.requests and all(one.finish in LOST for one in results.requests):
            raise EngineError(f"no request reached the server: {results.requests[0].detail}")
        kept = results.summary(slo)["slo"]
        doubts = () if results.client is None else tuple(results.client.doubts)
        probe = Probe(rate, kept["share"], kept["goodput"], kept["share"] >= search.share, doubts)
        probes.append(probe)
        tell(probe)
        if not probe.met and doubts and not again:
            again = True  # it may have been the client that missed it
            continue
        again = False
        if probe.met:
            low, best = rate, results
        else:
            high = rate
        if low is not None and high is not None and high <= low * (1 + search.precision):
            break
        rate = rate * 2 if high is None else rate / 2 if low is None else sqrt(low * high)
    return Found(low, high, tuple(probes), best)
