"""What the receiver does at a peer, each in a worker's thread: look up, fetch, keep, let go."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import ClassVar

from engine.core.plan import Transfer, TransferEvent
from engine.plugins.connectors import _handoff_questions as ask
from engine.plugins.connectors._handoff_desk import Desk
from engine.plugins.connectors._handoff_identity import Identity
from engine.plugins.connectors._handoff_movers import Load
from engine.plugins.connectors._handoff_peers import Claim
from engine.plugins.connectors._handoff_staging import NoRoom
from engine.plugins.connectors._handoff_wire import LeaseEnded, Line, LineError

log = logging.getLogger(__name__)


class Errand(ABC):
    """One of them. ``cancel`` ends it from another thread: it stops writing, and only then tells that it ended.

    Class attribute ``at_once``: it is done also while the peer is left alone because it failed.
    """

    at_once: ClassVar[bool] = False

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

    def ended(self, reason: str) -> None:  # noqa: B027
        """Tell how it ended, where somebody waits for that. An empty reason: well."""

    def _run(self) -> str:
        peers, address = self.desk.peers, self.address
        trouble = "cancelled" if self.cancelled else "" if self.at_once else peers.trouble(address)
        if trouble:
            return f"peer {address}: {trouble}"
        try:
            line, peer = peers.take(address, self._use)
            well = False
            try:
                self.talk(line, peer)
                well = True
            except LineError as error:
                well = error.well
                raise
            finally:
                well = self._leave() and well
                if well:
                    peers.give(address, line, peer)
                else:
                    line.close()
        except LineError as error:
            self.desk.tally.broken += 1
            if not (self.cancelled or self.at_once or isinstance(error, LeaseEnded | NoRoom)):
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
    """How many pages does the peer have? Claims them.

    Args:
        wait: seconds that the peer may wait for pages which it is still computing.
    """

    def __init__(self, desk: Desk, address: str, wish: Transfer, wait: float) -> None:
        super().__init__(desk, address)
        self.wish = wish
        self._count = 0
        self._until = time.monotonic() + wait

    def talk(self, line: Line, peer: Identity) -> None:
        """Ask until all is there or the time is over, and keep the claim."""
        keys, number = self.wish.keys, 0
        while True:
            left = self._until - time.monotonic()
            before = number
            number, self._count = ask.find(line, keys, self.desk.breath(peer, left), claim=before)
            if before and number != before:
                self.desk.let_go(Claim(self.address, peer.incarnation, before, peer.lease))
            if self._count == len(keys) or left <= 0 or self.cancelled:
                break
        if not self._count:
            return
        claim = Claim(self.address, peer.incarnation, number, peer.lease)
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
        self.good = 0

    def talk(self, line: Line, peer: Identity) -> None:
        """Read, and release.

        The sender ends no lease while it sends, so pages that came whole are right, whatever the answer to the release.
        """
        claim = self.desk.claimed(self.wish.request_id)
        if claim is None:
            number, _ = ask.find(line, self.wish.keys)
            claim = Claim(self.address, peer.incarnation, number, peer.lease)
        elif claim.incarnation != peer.incarnation:
            raise LeaseEnded("the peer was started anew")
        try:
            self.bring(line, peer, claim.number, len(self.wish.keys))
        except LineError as error:
            if self.cancelled or error.well:
                self.desk.let_go(claim)
            raise
        if not ask.release(line, claim.number):
            self.desk.tally.late += 1

    def bring(self, line: Line, peer: Identity, claim: int, upto: int) -> None:
        """Fill the pages from the first that is not there up to ``upto``. Raises ``LineError``."""
        first, wish = self.good, self.wish
        if first < upto:
            self.desk.movers.move(
                Load(line, peer, claim, wish.keys[first:upto], wish.pages[first:upto],
                     lambda count: self._counted(first + count), lambda: self.cancelled)
            )  # fmt: skip

    def ended(self, reason: str) -> None:
        """Done where all is there, whatever was said afterwards. A claim that was not used is not needed."""
        wish = self.wish
        if (claim := self.desk.claimed(wish.request_id)) is not None:
            self.desk.let_go(claim)
        if self.good == len(wish.pages) and not self.cancelled:
            self.desk.tell(TransferEvent(wish.id, "done"))
        else:
            failed = wish.pages[self.good :]
            self.desk.tell(TransferEvent(wish.id, "failed", failed_pages=failed, reason=reason or "cancelled"))

    def _counted(self, good: int) -> None:
        self.desk.tally.taken += good - self.good
        self.good = good


class Follow(Fetch):
    """Fill pages while the peer computes them, as they come. What has not come by ``until`` is left out."""

    def __init__(self, desk: Desk, address: str, wish: Transfer, until: float) -> None:
        super().__init__(desk, address, wish)
        self._until = until
        self._claims: list[int] = []

    def talk(self, line: Line, peer: Identity) -> None:
        """Ask for more than there is, read that, and so on; let go of everything at the end."""
        keys, desk = self.wish.keys, self.desk
        try:
            while self.good < len(keys):
                self._more(line, peer)
        except LineError as error:
            if self.cancelled or error.well:
                for number in self._claims:
                    desk.let_go(Claim(self.address, peer.incarnation, number, peer.lease))
            raise
        for number in self._claims:
            ask.release(line, number)

    def _more(self, line: Line, peer: Identity) -> None:
        keys, claims = self.wish.keys, self._claims
        left = self._until - time.monotonic()
        if left <= 0:
            raise LeaseEnded(f"the peer had {self.good} of {len(keys)} pages in time")
        breath = self.desk.breath(peer, left)
        number, count = ask.find(line, keys, breath, enough=self.good + 1, claim=claims[-1] if claims else 0)
        if number and number not in claims:
            claims.append(number)
        try:
            self.bring(line, peer, number, count)
        except LeaseEnded as error:  # it ended in between: there may be another
            log.debug("connector %s: request %s: %s", self.desk.name, self.wish.request_id, error)


class LetGo(Errand):
    """A claim is not needed. Nobody waits for this; where it fails, the lease expires."""

    at_once = True

    def __init__(self, desk: Desk, claim: Claim) -> None:
        super().__init__(desk, claim.address)
        self._claim = claim

    def talk(self, line: Line, peer: Identity) -> None:
        """Release it, unless the peer that knew it is gone."""
        if peer.incarnation == self._claim.incarnation:
            ask.release(line, self._claim.number)


class Renew(LetGo):
    """A claim is needed longer than its lease: its request waits. Where it fails, the fetch finds it out."""

    at_once = False

    def talk(self, line: Line, peer: Identity) -> None:
        """Renew it."""
        if peer.incarnation == self._claim.incarnation:
            ask.renew(line, self._claim.number)


class Decline(Errand):
    """What a peer was expected to compute for a request is not needed after all. Nobody waits for this either."""

    at_once = True

    def __init__(self, desk: Desk, address: str, keys: tuple[bytes, ...]) -> None:
        super().__init__(desk, address)
        self._keys = keys

    def talk(self, line: Line, peer: Identity) -> None:
        """Claim what there is, and release it."""
        number, count = ask.find(line, self._keys)
        if count:
            ask.release(line, number)
