"""How fast the engine goes, from the times at which steps are committed."""

from __future__ import annotations

from engine.core.plan import Outcome

LONGEST = 1.0  # seconds; a longer pause between two commits was no step
SHARE = 0.05  # of the newest step in the averages


class Pace:
    """Moving averages over steps. Attributes: ``step`` (seconds), ``tokens`` (a step), ``steps`` measured so far."""

    __slots__ = ("_since", "step", "steps", "tokens")

    def __init__(self) -> None:
        self.step = 0.0
        self.tokens = 0.0
        self.steps = 0
        self._since: float | None = None

    def tick(self, now: float, outcome: Outcome) -> None:
        """A step was committed. Mutates."""
        since, self._since = self._since, now
        plan = outcome.plan
        if since is not None and plan.requests and 0 < now - since <= LONGEST:
            self.steps += 1
            share = max(SHARE, 1 / self.steps)
            self.step += share * (now - since - self.step)
            self.tokens += share * (plan.total_tokens - self.tokens)
        if len(outcome.finished) >= len(plan.requests):  # perhaps a pause follows: it is no step
            self._since = None

    @property
    def token(self) -> float:
        """Seconds a token of any kind; 0 before anything was measured."""
        return self.step / self.tokens if self.tokens else 0.0
