"""How fast tokens are computed and how fast they are loaded: how much of a load is worth waiting for."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.protocols import Connector

SHARE = 0.2  # of the newest measurement in the averages
ALIKE = 0.05  # sizes that differ by less, in parts of their mean, say nothing of a latency


class Line:
    """What something of a size takes: a latency and seconds a unit, fitted to what was measured, old measurements
    weighing less and less. Where all sizes were alike there is no telling the two apart: then it goes by the unit."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def __bool__(self) -> bool:
        return self._weight > 0

    def add(self, size: float, seconds: float) -> None:
        """One measurement. Mutates."""
        keep = 1 - SHARE
        self._weight = keep * self._weight + 1
        self._x = keep * self._x + size
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + size * size
        self._xy = keep * self._xy + size * seconds

    def fitted(self) -> tuple[float, float]:
        """(latency, seconds a unit); zeros where nothing was measured. Does not mutate."""
        if not self._x:
            return 0.0, 0.0
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        if spread > (ALIKE * x) ** 2:
            slope = max(0.0, (self._xy / self._weight - x * y) / spread)
            if y - slope * x >= 0:
                return y - slope * x, slope
        return 0.0, y / x

    def predict(self, size: float) -> float:
        """Seconds that this size will take; 0 where nothing was measured, so that it is tried. Does not mutate."""
        latency, slope = self.fitted()
        return latency + slope * size


class Pace:
    """What computing a token takes, and what loading takes, by connector. What was never measured counts as free."""

    def __init__(self) -> None:
        self._computing = 0.0
        self._loading: dict[Connector, Line] = {}
        self._since: float | None = None

    def committed(self, now: float, tokens: int, rows: int) -> None:
        """A step was committed; only those that compute prompts say what a prompt costs. Mutates."""
        since, self._since = self._since, now
        if since is not None and tokens >= 2 * rows > 0:
            self._computing = _mean(self._computing, (now - since) / tokens)

    def paused(self) -> None:
        """Nothing is computed for a while: the time until the next commit is not a step's. Mutates."""
        self._since = None

    def loaded(self, source: Connector, seconds: float, tokens: int) -> None:
        """A load is over, its waiting included. Mutates."""
        self._loading.setdefault(source, Line()).add(tokens, seconds)

    def worth(self, source: Connector, cached: int, found: int, costs: Sequence[tuple[int, float]] = ()) -> int:
        """How many tokens to load so that the prompt is there soonest; ``cached`` where none. Does not mutate.

        If two choices look alike, the longer load wins: it spares the model.

        Args:
            cached: tokens that are here already.
            found: tokens that the source has.
            costs: ``TransferEvent.costs``: what the source itself says it takes, from the first token on.
        """
        if not self._computing:
            return found
        line = self._loading.get(source, Line())
        offers = _beyond(cached, found, costs) if costs else [(found, line.predict(found - cached))]
        upto, took = cached, (found - cached) * self._computing
        for tokens, seconds in offers:
            whole = seconds + (found - tokens) * self._computing
            if whole <= took:
                upto, took = tokens, whole
        return upto

    def stats(self) -> dict[str, float]:
        """Seconds a token that computing a prompt takes; 0 where it was not measured yet."""
        return {"computing_seconds_per_token": self._computing}

    def stats_of(self, source: Connector) -> dict[str, float]:
        """What loads from it take, as far as was measured. None where nothing was."""
        line = self._loading.get(source)
        if line is None:
            return {}
        latency, slope = line.fitted()
        return {"load_latency_seconds": latency, "load_seconds_per_token": slope}


def _beyond(cached: int, found: int, costs: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """(tokens, seconds) of the offers that give more than is cached; what is cached need not be loaded."""
    offers: list[tuple[int, float]] = []
    before, spent, known = 0, 0.0, 0.0
    for tokens, seconds in costs:
        if tokens <= cached:
            known = seconds
        elif before <= cached:  # the part of it that is cached goes by its share
            known = spent + (seconds - spent) * (cached - before) / (tokens - before)
        if cached < tokens <= found:
            offers.append((tokens, max(0.0, seconds - known)))
        before, spent = tokens, seconds
    return offers


def _mean(before: float, new: float) -> float:
    return before + SHARE * (new - before) if before else new
