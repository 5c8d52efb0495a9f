"""Two orders of one queue, interleaved: what a policy prefers, and now and then the oldest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.core.request import Request


def interleave(
    preferred: Sequence[Request], elders: Iterable[Request], due: Callable[[int, Request], bool], places: int
) -> list[Request]:
    """The preferred order, but where ``due(place, oldest)`` says so the oldest that is left comes first.

    Only the first ``places`` are looked at: no more can start.
    """
    first: dict[Request, None] = {}
    by_age, by_wish = iter(elders), iter(preferred)
    oldest = next(by_age, None)
    while oldest is not None and len(first) < places:
        if due(len(first), oldest):
            first[oldest] = None
        else:
            first[next(request for request in by_wish if request not in first)] = None
        while oldest is not None and oldest in first:
            oldest = next(by_age, None)
    return [*first, *(request for request in preferred if request not in first)]
