"""Pages that wait to be fetched: which, for how long, and who is reading them.

A *hand-off* is what one request has computed so far, chunk by chunk. The core fences its pages as long as their
transfers are open, and a transfer is open until its hand-off ends: when every receiver that claimed it has released it,
or when its time is up; in both cases not while somebody reads.

    computing ── push ──▶ leased ── READ ──▶ sending ── sent ──▶ leased ── RELEASE, expiry, close ──▶ ended
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.plan import Transfer


@dataclass(slots=True, eq=False)
class HandOff:
    """What one request has computed. ``until`` is on this process's own clock."""

    until: float
    pages: dict[bytes, int] = field(default_factory=dict)
    transfers: list[str] = field(default_factory=list)
    claims: set[int] = field(default_factory=set)
    readers: int = 0
    released: bool = False

    def over(self, now: float) -> bool:
        """Whether nobody may begin to read it any more."""
        return self.released or now > self.until


class Leases:
    """The hand-offs. Any thread may call; nothing here waits but ``find``, if it is told to.

    Attributes: ``released`` and ``expired``, hand-offs by how they ended.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._all: list[HandOff] = []
        self._latest: dict[str, HandOff] = {}  # by request
        self._claims: dict[int, HandOff] = {}
        self._closed = False
        self.released = self.expired = 0

    def add(self, wish: Transfer) -> None:
        """More pages of a request. Mutates."""
        with self._changed:
            deadline = self._clock() + self._seconds
            hand_off = self._latest.get(wish.request_id)
            if hand_off is None or hand_off.over(self._clock()) or (wish.keys and wish.keys[0] in hand_off.pages):
                hand_off = self._latest[wish.request_id] = HandOff(deadline)
                self._all.append(hand_off)
            hand_off.until = deadline
            hand_off.pages.update(zip(wish.keys, wish.pages, strict=True))
            hand_off.transfers.append(wish.id)
            self._changed.notify_all()

    def find(self, keys: Sequence[bytes], wait: float, enough: int = 0, claim: int = 0) -> tuple[int, int]:
        """A claim, and how many of these pages in a row it is for: (0, 0) where there are none. Mutates.

        Args:
            wait: seconds to wait for those that are missing.
            enough: so many need not be waited for; 0: all of them.
            claim: what the receiver has claimed already: the same hand-off if no other has more.
        """
        until = time.monotonic() + wait
        with self._changed:
            while True:
                now = self._clock()
                if (mine := self._held(claim)) is not None:
                    self._begin_anew(mine)
                live = [one for one in self._all if not one.over(now)]
                best = max(live, key=lambda one: (_count(one, keys), one is mine, not one.claims), default=None)
                count = 0 if best is None else _count(best, keys)
                left = until - time.monotonic()
                if count >= (enough or len(keys)) or left <= 0 or self._closed:
                    break
                self._changed.wait(min(left, self._seconds / 3))
            if best is None or not count:
                return 0, 0
            return (claim if best is mine else self._claim(best)), count

    def places(self, claim: int, keys: Sequence[bytes]) -> list[int] | None:
        """The pages of the first keys, as far as the hand-off has them; ``None`` where the lease has ended. Mutates:
        its time begins anew."""
        with self._changed:
            found = self._found(claim, keys)
            return None if found is None else found[1]

    def begin(self, claim: int, keys: Sequence[bytes]) -> tuple[HandOff, list[int]] | None:
        """Somebody reads: the hand-off does not end before ``end``. Mutates.

        Returns it and the pages of the first keys, as far as it has them; ``None`` where the lease has ended.
        """
        with self._changed:
            found = self._found(claim, keys)
            if found is not None:
                found[0].readers += 1
            return found

    def end(self, hand_off: HandOff, *, well: bool) -> None:
        """One of its readers is done. Mutates: if all went well, the time begins anew, for it may read on."""
        with self._changed:
            hand_off.readers -= 1
            if well:
                self._begin_anew(hand_off)

    def renew(self, claim: int) -> bool:
        """Begin the time anew; False where it is over. Mutates."""
        with self._changed:
            hand_off = self._held(claim)
            if hand_off is None:
                return False
            self._begin_anew(hand_off)
            return True

    def release(self, claim: int) -> bool:
        """The receiver needs it no more. True if it was held until now. Mutates. Idempotent."""
        with self._changed:
            hand_off = self._held(claim)
            gone = self._claims.pop(claim, None)
            if gone is not None:
                gone.claims.discard(claim)
                gone.released = gone.released or not gone.claims
            return hand_off is not None

    def collect(self) -> list[str]:
        """The transfers of the hand-offs that have ended since the last call; all are looked at. Mutates."""
        with self._changed:
            now = self._clock()
            ended = [one for one in self._all if not one.readers and one.over(now)]
            for hand_off in ended:
                self._all.remove(hand_off)
                self.released += hand_off.released
                self.expired += not hand_off.released
                for claim in hand_off.claims:
                    del self._claims[claim]
            if ended:
                self._latest = {name: one for name, one in self._latest.items() if one not in ended}
            return [name for one in ended for name in one.transfers]

    def void(self) -> None:
        """What is leased is of no use to anybody any more. Mutates."""
        with self._changed:
            for hand_off in self._all:
                hand_off.released = True
            self._latest.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody waits and nobody begins to read any more. Mutates."""
        with self._changed:
            self._closed = True
        self.void()

    @property
    def pages(self) -> int:
        """Pages that are leased, counted as often as they are."""
        with self._changed:
            return sum(len(one.pages) for one in self._all)

    def __len__(self) -> int:
        return len(self._all)

    def _claim(self, hand_off: HandOff) -> int:
        claim = secrets.randbits(63) | 1
        hand_off.claims.add(claim)
        self._begin_anew(hand_off)
        self._claims[claim] = hand_off
        return claim

    def _begin_anew(self, hand_off: HandOff) -> None:
        """Its time."""
        hand_off.until = self._clock() + self._seconds

    def _found(self, claim: int, keys: Sequence[bytes]) -> tuple[HandOff, list[int]] | None:
        """What is claimed, its time begun anew, and its pages of the first keys; ``None`` where the lease has ended."""
        hand_off = self._held(claim)
        if hand_off is None:
            return None
        self._begin_anew(hand_off)
        return hand_off, [hand_off.pages[key] for key in keys[: _count(hand_off, keys)]]

    def _held(self, claim: int) -> HandOff | None:
        hand_off = self._claims.get(claim)
        return None if hand_off is None or hand_off.over(self._clock()) else hand_off


def _count(hand_off: HandOff, keys: Sequence[bytes]) -> int:
    """How many of the keys in a row it has."""
    return next((at for at, key in enumerate(keys) if key not in hand_off.pages), len(keys))
