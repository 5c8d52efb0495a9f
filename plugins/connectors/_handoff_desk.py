"""What the errands of one connector share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.plan import Transfer, TransferEvent
from engine.plugins.connectors._handoff_identity import Identity
from engine.plugins.connectors._handoff_movers import Movers
from engine.plugins.connectors._handoff_peers import Claim, Peers


@dataclass(slots=True)
class Tally:
    """Counts of a receiver. Written by several threads, so they are near the truth and not exact."""

    taken: int = 0  # pages
    broken: int = 0  # errands that failed
    late: int = 0  # leases that had ended when the pages were there


@dataclass(frozen=True, slots=True)
class Desk:
    """What errands share.

    Args:
        name: the connector's, for messages.
        stall: seconds without a byte after which a peer is given up.
        tell: told how an errand ended; from any thread.
        hold: told of a claim that a look-up found, with its transfer.
        claimed: the claim that a request's look-up found, to be used up.
        let_go: has a claim released that nobody will use.
    """

    name: str
    peers: Peers
    movers: Movers
    page_size: int
    stall: float
    tally: Tally
    tell: Callable[[TransferEvent], None]
    claimed: Callable[[str], Claim | None]
    hold: Callable[[Transfer, Claim], None]
    let_go: Callable[[Claim], None]

    def breath(self, peer: Identity, left: float) -> float:
        """How long one question may have the peer wait, so that neither the line nor the lease ends meanwhile."""
        return max(0.0, min(left, self.stall / 2, peer.lease / 3))
