"""What each tenant has been served, brought up to date when somebody asks and not with every token."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.request import Request, State

PATIENCE = 32  # times that somebody asks before all that run are charged

Charge = Callable[[Request, float], None]


class Service:
    """Charges requests for their progress: ``cost(request)`` grows as it is served; ``charge`` gets the increments.

    A request that is preempted is not charged for computing the same again.
    """

    def __init__(self, cost: Callable[[Request], float], charge: Charge) -> None:
        self._cost = cost
        self._charge = charge
        self._asked = 0
        self._paid: dict[Request, float] = {}  # requests that have started and are not known to have ended

    def settle(self, running: Callable[[], Iterable[Request]], started: Iterable[Request]) -> None:
        """Charge those of ``started`` that really did; all that run only every ``PATIENCE`` times. Mutates."""
        self._asked += 1
        everybody = self._asked % PATIENCE == 0
        if everybody:
            for request in running():
                self._paid.setdefault(request, 0.0)
        for request in list(self._paid) if everybody else started:
            if request.state is State.FINISHED:  # aborted: no commit tells
                if request in self._paid:
                    self.end(request)
            elif request.state is State.RUNNING:
                before, cost = self._paid.get(request, 0.0), self._cost(request)
                self._paid[request] = cost
                if cost > before:
                    self._charge(request, cost - before)

    def end(self, request: Request) -> None:
        """Charge a request that ended for what it has not paid yet. Mutates. Call it once a request."""
        self._charge(request, max(0.0, self._cost(request) - self._paid.pop(request, 0.0)))
