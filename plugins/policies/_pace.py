"""How fast the engine goes, from the times at which steps are committed."""

from __future__ import annotations

from engine.core.plan import Outcome

LONGEST = 1.0  # seconds; a longer pause between two commits was no step
SHARE = 0.02  # of the newest step in the averages


class Pace:
    """Moving averages over steps. Attributes: ``step`` (mean seconds of one), ``steps`` (measured so far)."""

    __slots__ = ("_both", "_since", "_square", "_tokens", "step", "steps")

    def __init__(self) -> None:
        self.step = 0.0
        self.steps = 0
        self._tokens = 0.0  # means: of tokens a step, of their square, of tokens times seconds
        self._square = 0.0
        self._both = 0.0
        self._since: float | None = None

    def tick(self, now: float, outcome: Outcome) -> None:
        """A step was committed. Mutates."""
        since, self._since = self._since, now
        plan = outcome.plan
        if since is not None and plan.requests and 0 < now - since <= LONGEST:
            self.steps += 1
            share = max(SHARE, 1 / self.steps)
            seconds, tokens = now - since, plan.total_tokens
            self.step += share * (seconds - self.step)
            self._tokens += share * (tokens - self._tokens)
            self._square += share * (tokens * tokens - self._square)
            self._both += share * (tokens * seconds - self._both)
        if len(outcome.finished) >= len(plan.requests):  # perhaps a pause follows: it is no step
            self._since = None

    @property
    def token(self) -> float:
        """Seconds that one token more adds to a step: the slope of a line through the steps (0: cannot be told)."""
        spread = self._square - self._tokens**2
        slope = (self._both - self._tokens * self.step) / spread if spread > 1e-9 * self._square else 0.0
        return max(0.0, min(slope, self.step))
