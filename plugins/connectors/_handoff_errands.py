"""What the receiver does at a peer, each in a worker's thread: look up, fetch, let go."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.plan import Transfer, TransferEvent
from engine.plugins.connectors import _handoff_questions as ask
from engine.plugins.connectors._handoff_identity import Identity
from engine.plugins.connectors._handoff_peers import Claim, Peers
from engine.plugins.connectors._handoff_rows import Rows
from engine.plugins.connectors._handoff_wire import LeaseEnded, Line, LineError

log = logging.getLogger(__name__)


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
        tell: told how an errand ended; from any thread.
        hold: told of a claim that a look-up found, with its transfer.
        claimed: the claim that a request's look-up found, to be used up.
        let_go: has a claim released that nobody will use.
        wait: seconds that a peer may wait for pages which it is still computing.
        checked: whether bytes are compared with their checksums.
    """

    name: str
    peers: Peers
    rows: Rows
    page_size: int
    wait: float
    checked: bool
    tally: Tally
    tell: Callable[[TransferEvent], None]
    claimed: Callable[[str], Claim | None]
    hold: Callable[[Transfer, Claim], None]
    let_go: Callable[[Claim], None]


class Errand(ABC):
    """One of them. ``cancel`` ends it from another thread: it stops writing, and only then tells that it ended."""

    def __init__(self, desk: Desk, address: str) -> None:
        self.desk, self.address = desk, address
        self.cancelled = False
        self._line: Line | None = None
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Cut its connection. Returns at once."""
        with self._lock:
            self.cancelled = True
            if self._line is not None:
                self._line.cut()

    def run(self) -> None:
        """Do it. Raises nothing."""
        try:
            reason = self._run()
        except Exception as error:  # a worker must live, and every errand must end
            log.exception("connector %s: an errand to %s broke down", self.desk.name, self.address)
            reason = f"{type(error).__name__}: {error}"
        self.ended(reason)

    @abstractmethod
    def talk(self, line: Line, peer: Identity) -> None:
        """What there is to ask. Raises ``LineError``."""

    @abstractmethod
    def ended(self, reason: str) -> None:
        """Tell how it ended. An empty reason: well."""

    def _run(self) -> str:
        peers, address = self.desk.peers, self.address
        trouble = "cancelled" if self.cancelled else peers.trouble(address)
        if trouble:
            return f"peer {address}: {trouble}"
        try:
            line, peer = peers.take(address, self._use)
            well = False
            try:
                self.talk(line, peer)
                well = True
            except LeaseEnded:
                well = True
                raise
            finally:
                well = self._leave() and well
                if well:
                    peers.give(address, line, peer)
                else:
                    line.close()
        except LineError as error:
            self.desk.tally.broken += 1
            if not (self.cancelled or isinstance(error, LeaseEnded)):
                peers.failed(address, error)
            return f"peer {address}: {'cancelled' if self.cancelled else error}"
        return ""

    def _use(self, line: Line) -> None:
        with self._lock:
            self._line = line
            if self.cancelled:
                line.cut()

    def _leave(self) -> bool:
        """The line is not this errand's any more. Whether it was left whole."""
        with self._lock:
            self._line = None
            return not self.cancelled


class LookUp(Errand):
    """How many pages does the peer have? Claims them."""

    def __init__(self, desk: Desk, address: str, wish: Transfer) -> None:
        super().__init__(desk, address)
        self.wish = wish
        self._count = 0

    def talk(self, line: Line, peer: Identity) -> None:
        """Ask, and keep the claim."""
        number, self._count = ask.find(line, self.wish.keys, self.desk.wait)
        if not self._count:
            return
        claim = Claim(self.address, peer.incarnation, number)
        if self.cancelled:
            self.desk.let_go(claim)
        else:
            self.desk.hold(self.wish, claim)

    def ended(self, reason: str) -> None:
        """Found so much, or failed."""
        if reason:
            self.desk.tell(TransferEvent(self.wish.id, "failed", reason=reason))
        else:
            self.desk.tell(TransferEvent(self.wish.id, "found", tokens=self._count * self.desk.page_size))


class Fetch(Errand):
    """Fill pages. Nothing writes to them after ``ended``: the only thread that does is this one."""

    def __init__(self, desk: Desk, address: str, wish: Transfer) -> None:
        super().__init__(desk, address)
        self.wish = wish
        self._good = 0

    def talk(self, line: Line, peer: Identity) -> None:
        """Read, and release.

        The sender ends no lease while it sends, so pages that came whole are right, whatever the answer to the release.
        """
        wish, desk = self.wish, self.desk
        claim = desk.claimed(wish.request_id)
        if claim is None:
            number, _ = ask.find(line, wish.keys, 0)
            claim = Claim(self.address, peer.incarnation, number)
        elif claim.incarnation != peer.incarnation:
            raise LeaseEnded("the peer was started anew")
        try:
            ask.read(line, claim.number, wish.keys, wish.pages, desk.rows, self._counted, checked=desk.checked)
        except LineError as error:
            if self.cancelled or isinstance(error, LeaseEnded):
                desk.let_go(claim)
            raise
        if not ask.release(line, claim.number):
            desk.tally.late += 1

    def ended(self, reason: str) -> None:
        """Done where all is there, whatever was said afterwards."""
        wish = self.wish
        if self._good == len(wish.pages) and not self.cancelled:
            self.desk.tell(TransferEvent(wish.id, "done"))
        else:
            failed = wish.pages[self._good :]
            self.desk.tell(TransferEvent(wish.id, "failed", failed_pages=failed, reason=reason or "cancelled"))

    def _counted(self, good: int) -> None:
        self.desk.tally.taken += good - self._good
        self._good = good


class LetGo(Errand):
    """The claim is not needed. Nobody waits for this; where it fails, the lease expires."""

    def __init__(self, desk: Desk, claim: Claim) -> None:
        super().__init__(desk, claim.address)
        self._claim = claim

    def talk(self, line: Line, peer: Identity) -> None:
        """Release it, unless the peer that knew it is gone."""
        if peer.incarnation == self._claim.incarnation:
            ask.release(line, self._claim.number)

    def ended(self, reason: str) -> None:
        """Nobody is told."""
