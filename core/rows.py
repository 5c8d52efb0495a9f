"""The rows of a plan in the making: who computes how many tokens from where, and what of each is known."""

from __future__ import annotations

from engine.core.plan import Why
from engine.core.request import Request


class Rows:
    """Parallel lists, one entry a row, in the order of the grants. A request has at most one row.

    ``Step.grant_decodes`` appends to ``requests`` and ``starts`` only, and has the rest filled up by ``even_out``.

    Attributes:
        requests, starts, counts, samples: as in ``Plan``.
        drafts: tokens that a request's row verifies.
        partial: requests that were granted something and owe more.
        pools: whether there is, or was, a row of a request that pools.
        cuts: request id -> why it computes less than it owes.
    """

    __slots__ = ("_places", "counts", "cuts", "drafts", "partial", "pools", "requests", "samples", "starts")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.samples: list[bool] = []
        self.drafts: dict[Request, tuple[int, ...]] = {}
        self.partial: set[Request] = set()
        self.cuts: dict[str, Why] = {}
        self.pools = False
        self._places: dict[Request, int] = {}  # request -> its row, for the first rows; filled up when asked

    def place(self, request: Request) -> int | None:
        """The request's row so far."""
        places, requests = self._places, self.requests
        for row in range(len(places), len(requests)):
            places[requests[row]] = row
        return places.get(request)

    def granted(self, request: Request) -> int:
        """Tokens that the request computes so far."""
        row = self.place(request)
        return 0 if row is None else self.counts[row]

    def pooled(self) -> tuple[int, ...]:
        """Rows of requests that pool."""
        if not self.pools:
            return ()
        return tuple([row for row, request in enumerate(self.requests) if request.pooling is not None])

    def even_out(self) -> int:
        """Fill up the rows that were made since: they compute one token each, and sample. Returns how many. Mutates."""
        new = len(self.requests) - len(self.counts)
        self.counts += [1] * new
        self.samples += [True] * new
        return new

    def add(self, request: Request, count: int, why_less: Why) -> None:
        """The request computes ``count`` tokens (more), and ``why_less`` if it then still owes some.

        Mutates, also the request's ``planned`` and ``drafts``: drafts that do not fit are forgotten.
        """
        upto = request.planned + count
        known = len(request.tokens) + request.pending
        samples = upto >= known
        if request.pooling is not None:
            samples, self.pools = False, True
        row = self.place(request) if request in self.partial else None
        if row is not None:
            self.counts[row] += count
            self.samples[row] = samples
        else:
            self.requests.append(request)
            self.starts.append(request.planned)
            self.counts.append(count)
            self.samples.append(samples)
        request.planned = upto
        if request.drafts:
            if upto > known:
                self.drafts[request] = request.drafts[: upto - known]
            request.drafts = ()
        if upto < known:
            self.partial.add(request)
            self.cuts[request.id] = why_less
        elif row is not None:
            self.partial.discard(request)
            del self.cuts[request.id]

    def drop(self, request: Request) -> int:
        """Take the request's row out; returns the tokens that it computed. Mutates, also the request's ``planned``."""
        row = self.place(request)
        if row is None:
            return 0
        count = self.counts.pop(row)
        del self.requests[row], self.starts[row], self.samples[row]
        self._places.clear()
        if request in self.partial:
            self.partial.discard(request)
            del self.cuts[request.id]
        self.drafts.pop(request, None)
        request.planned -= count
        return count
