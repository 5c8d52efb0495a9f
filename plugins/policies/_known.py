"""What a policy knows of each waiting request, kept from step to step: most of the queue is the same as before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from engine.core.request import Request

T = TypeVar("T")
PATIENCE = 8  # times that something is asked before all of it is looked at anew


def by_age(request: Request) -> tuple[bool, int]:
    """Those that were preempted first, then in order of joining the queue."""
    return request.preemptions == 0, request.entry_index


class Known(Generic[T]):
    """A value for each request that waits, oldest first (those that were preempted before all others).

    Values are learned when a request is first seen, and unless they are ``fixed`` all of them again every few times.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        self._fixed = fixed
        self._known: dict[Request, T] = {}
        self._asked = 0

    def update(self, waiting: Sequence[Request], learn: Callable[[Request], T]) -> dict[Request, T]:
        """The values of those that wait now; those of others are forgotten. Mutates."""
        self._asked += 1
        before, here = self._known, set(waiting)
        new = sorted([request for request in waiting if request not in before], key=by_age)
        kept = [request for request in before if request in here]
        if not self._fixed and self._asked % PATIENCE == 0:
            before = {}
        ages = [*(r for r in new if r.preemptions), *kept, *(r for r in new if not r.preemptions)]
        self._known = {request: before[request] if request in before else learn(request) for request in ages}
        return self._known
