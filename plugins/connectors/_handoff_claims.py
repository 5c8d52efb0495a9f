"""What look-ups have found or promised, until their requests fetch it or do not want it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from engine.core.plan import Transfer
from engine.plugins.connectors._handoff_peers import Claim


@dataclass(slots=True)
class Kept:
    """A claim that a request has. ``due``: when its lease is to be renewed."""

    probe: str
    claim: Claim
    due: float


@dataclass(frozen=True, slots=True)
class Expected:
    """What a peer is said to compute now. ``until``: how long it is waited for."""

    probe: str
    address: str
    keys: tuple[bytes, ...]
    until: float


class Claims:
    """Claims by request. ``keep`` and ``use`` may be called by any thread, the others by the engine's."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}
        self._expected: dict[str, Expected] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def keep(self, wish: Transfer, claim: Claim) -> None:
        """A look-up has found something. Mutates."""
        self._kept[wish.request_id] = Kept(wish.id, claim, time.monotonic() + claim.lease / 3)

    def use(self, request_id: str) -> Claim | None:
        """What its look-up found; it is not kept any more. Mutates."""
        kept = self._kept.pop(request_id, None)
        return None if kept is None else kept.claim

    def due(self, now: float) -> Iterator[Claim]:
        """Claims whose lease is to be renewed now. Mutates: the next time is later."""
        for kept in list(self._kept.values()):
            if now >= kept.due:
                kept.due = now + kept.claim.lease / 3
                yield kept.claim

    def expect(self, wish: Transfer, address: str, until: float) -> None:
        """A look-up need not be made: the peer is said to compute it all. Mutates."""
        self._expected[wish.request_id] = Expected(wish.id, address, wish.keys, until)

    def expected(self, request_id: str) -> float | None:
        """Until when what is expected is waited for; ``None``: nothing is. Mutates: it is asked once."""
        expected = self._expected.pop(request_id, None)
        return None if expected is None else expected.until

    def decline(self, cancel: Transfer) -> Claim | tuple[str, tuple[bytes, ...]] | None:
        """What the cancelled look-up had found, or where what was expected of whom; ``None``: nothing. Mutates."""
        name, probe = cancel.request_id, cancel.of
        if name in self._expected and self._expected[name].probe == probe:
            expected = self._expected.pop(name)
            return expected.address, expected.keys
        kept = self._kept.get(name)
        return self.use(name) if kept is not None and kept.probe == probe else None
