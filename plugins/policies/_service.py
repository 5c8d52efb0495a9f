"""What each tenant has been served, brought up to date when somebody asks and not with every token."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.request import Request, State

Charge = Callable[[Request, float], None]


class Service:
    """Charges requests for their progress: ``cost(request)`` grows as it is served; ``charge`` gets the increments.

    A request that is preempted is not charged for computing the same again.
    """

    def __init__(self, cost: Callable[[Request], float], charge: Charge) -> None:
        self._cost = cost
        self._charge = charge
        self._paid: dict[Request, float] = {}  # requests that have started and are not known to have ended

    def settle(self, running: Iterable[Request]) -> None:
        """Charge all that run, and those that ended unseen (aborted) for the last time. Mutates."""
        paid, cost_of, charge = self._paid, self._cost, self._charge
        for request in running:
            paid.setdefault(request, 0.0)
        for request, before in list(paid.items()):
            if request.state is State.FINISHED:
                self.end(request)
                continue
            cost = cost_of(request)
            if cost > before:
                paid[request] = cost
                charge(request, cost - before)

    def end(self, request: Request) -> None:
        """Charge a request that ended for what it has not paid yet. Mutates. Call it once a request."""
        self._charge(request, max(0.0, self._cost(request) - self._paid.pop(request, 0.0)))
