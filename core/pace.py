"""How fast tokens are computed and how fast they are loaded: whether it is worth waiting for a load."""

from __future__ import annotations

from engine.core.protocols import Connector

SHARE = 0.2  # of the newest measurement in the averages


class Pace:
    """Moving averages of seconds a token. What was never measured is taken to be free, so that it is tried."""

    def __init__(self) -> None:
        self._computing = 0.0
        self._loading: dict[Connector, float] = {}
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
        self._loading[source] = _mean(self._loading.get(source, 0.0), seconds / tokens)

    def worth(self, source: Connector) -> bool:
        """Whether loading has been faster than computing. If both look alike, loading spares the model."""
        return not self._computing or self._loading.get(source, 0.0) <= self._computing


def _mean(before: float, new: float) -> float:
    return before + SHARE * (new - before) if before else new
