"""How long outputs turn out to be: a moving mean for each group of requests."""

from __future__ import annotations

from engine.core.request import Request
from engine.plugins.policies._metadata import label, number

MAX_GROUPS = 1024
SHARE = 0.1  # of the newest output in a mean


class OutputLengths:
    """Predicts output lengths: what the request says, else its group's mean, else everybody's, else the limit."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._means: dict[str, float] = {}  # least recently learned first
        self._mean: float | None = None

    def learn(self, request: Request) -> None:
        """A request has ended. One that pools says nothing of outputs. Mutates."""
        if request.pooling is not None:
            return
        group, length = label(request, self._key), float(request.num_output)
        before = self._means.pop(group, length)
        self._means[group] = before + SHARE * (length - before)
        self._mean = length if self._mean is None else self._mean + SHARE * (length - self._mean)
        if len(self._means) > MAX_GROUPS:
            del self._means[next(iter(self._means))]

    def predict(self, request: Request) -> float:
        """Output tokens in all; at least one more than it has, at most what it may have. Does not mutate."""
        said = number(request, "predicted_tokens")
        if said is None:
            said = self._means.get(label(request, self._key), self._mean)
        if said is None:
            said = request.max_new
        return max(request.num_output + 1.0, min(said, request.max_new))
