"""Who comes after whom in a workload, and what they begin with."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from engine.lab.arrivals import Arrival, Workload

SKIPPED = "what it follows was not answered"


class Following:
    """Keeps what was said for those that continue it, and says who may come once somebody has ended.

    Attributes:
        roots: requests that follow nobody, in order of time.
    """

    def __init__(self, workload: Workload) -> None:
        self.roots: list[Arrival] = []
        self._followers: dict[str, list[Arrival]] = defaultdict(list)
        self._missing: dict[str, int] = {}  # request -> how many of those that it follows have not ended
        self._said: dict[str, Any] = {}
        self._continued = Counter(one.continues for one in workload if one.continues)
        for one in workload:
            if one.after:
                self._missing[one.id] = len(one.after)
                for other in one.after:
                    self._followers[other].append(one)
            else:
                self.roots.append(one)

    def continued(self, name: str) -> bool:
        """Whether somebody is going to continue it."""
        return self._continued[name] > 0

    def begin(self, arrival: Arrival) -> Any:
        """What it begins with: what was said by the one that it continues; ``None``: nothing. The last one to ask takes
        that away. Mutates."""
        name = arrival.continues
        if not name:
            return None
        self._continued[name] -= 1
        return self._said[name] if self._continued[name] else self._said.pop(name)

    def ended(
        self, arrival: Arrival, said: Any, *, come: Callable[[Arrival], None], skip: Callable[[Arrival], None]
    ) -> None:
        """It has ended. Mutates.

        Args:
            said: what those that continue it begin with; ``None``: it was not answered, and they never come.
            come: called with each follower that waits for nobody else.
            skip: called with each that never comes; its own followers are to be told of that in turn.
        """
        if said is not None and self._continued[arrival.id]:
            self._said[arrival.id] = said
        for follower in self._followers.pop(arrival.id, ()):
            if follower.id not in self._missing:
                continue  # it was skipped already
            self._missing[follower.id] -= 1
            if said is None:
                del self._missing[follower.id]
                skip(follower)
            elif not self._missing[follower.id]:
                del self._missing[follower.id]
                come(follower)
