"""Two orders of one queue, interleaved: what a policy prefers, and now and then the oldest."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.request import Request


def by_age(request: Request) -> tuple[bool, int]:
    """Those that were preempted first, then in order of joining the queue."""
    return request.preemptions == 0, request.entry_index


def interleave(preferred: Iterable[Request], due: Callable[[int, Request], bool]) -> list[Request]:
    """The preferred order, but where ``due(place, oldest)`` says so the oldest that is left comes first."""
    preferred = list(preferred)
    elders = sorted(preferred, key=by_age)
    placed: set[Request] = set()
    order: list[Request] = []
    next_elder = next_preferred = 0
    while len(order) < len(preferred):
        while elders[next_elder] in placed:
            next_elder += 1
        while preferred[next_preferred] in placed:
            next_preferred += 1
        chosen = elders[next_elder]
        if not due(len(order), chosen):
            chosen = preferred[next_preferred]
        placed.add(chosen)
        order.append(chosen)
    return order
