"""How pages come to the receiver: *streamed* over the line, *pulled* by a transport, or *pushed* by the sender's.

Whatever moves them, a page counts only when it is whole and the sender held it until then; and when a mover has
returned or raised, nothing writes to KV memory any more. A transport that may write late sees the staging area only.
"""

from __future__ import annotations

import logging
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.plugins.connectors import _handoff_questions as ask
from engine.plugins.connectors._handoff_identity import Identity
from engine.plugins.connectors._handoff_rows import Rows, merged, portions, scattered, staged
from engine.plugins.connectors._handoff_staging import LARGEST, Limbo, Slot, Staging, settled
from engine.plugins.connectors._handoff_wire import LeaseEnded, Line, LineError, Refused
from engine.plugins.connectors._transport import Motion, Transport, TransportError, Words

log = logging.getLogger(__name__)

FIRST_LOOK, LAST_LOOK = 20e-6, 1e-3  # seconds between two looks at a motion: longer and longer


@dataclass(frozen=True, slots=True)
class Load:
    """Pages to fetch from a peer.

    Args:
        good: told how many pages, from the first on, are right, as they come. What is beyond may hold anything.
        cancelled: whether nobody wants them any more.
    """

    line: Line
    peer: Identity
    claim: int
    keys: Sequence[bytes]
    pages: Sequence[int]
    good: Callable[[int], None]
    cancelled: Callable[[], bool]


class MotionFailed(LineError):
    """The transport could not move the bytes."""

    well = True


def looks(motion: Motion, name: str, stall: float) -> Iterator[float]:
    """Look until a motion has ended, and yield the time of each look at which it has not. Raises ``MotionFailed``.

    Args:
        name: the transport's, for messages.
        stall: seconds after which it is given up.
    """
    began, pause = time.monotonic(), FIRST_LOOK
    while (state := motion.state()) == "moving":
        now = time.monotonic()
        if now - began > stall:
            raise MotionFailed(f"{name}: it has not ended in {stall:g} seconds")
        yield now
        time.sleep(pause)
        pause = min(pause * 1.5, LAST_LOOK)
    if state == "failed":
        raise MotionFailed(f"{name}: {motion.reason or 'it failed'}")


class Mover(Protocol):
    """Fills pages."""

    def move(self, load: Load) -> None:
        """Fill the pages. Raises ``LineError``; ``LeaseEnded`` where the peer has them no more, or not all."""


class Streamed:
    """The bytes come over the line, straight into KV memory."""

    def __init__(self, rows: Rows, *, checked: bool) -> None:
        self._rows, self._checked = rows, checked

    def move(self, load: Load) -> None:
        """See ``Mover``. The sender ends no lease while it sends, so what came whole is right."""
        ask.read(load.line, load.claim, load.keys, load.pages, self._rows, load.good, checked=self._checked)


class Pulled:
    """The transport reads the sender's memory. That may be somebody else's meanwhile: a batch counts only if the sender
    says afterwards that it held the pages until now.

    Args:
        staging: where it reads to; ``None``: straight into KV memory, for it does not write late.
        stall: seconds after which a motion that has not ended is given up.
    """

    def __init__(self, rows: Rows, transport: Transport, staging: Staging | None, stall: float) -> None:
        self._rows, self._transport, self._staging, self._stall = rows, transport, staging, stall
        self._regions = rows.places()

    def move(self, load: Load) -> None:
        """See ``Mover``."""
        if [size for _, size, _ in load.peer.regions] != [size for _, size, _ in self._regions]:
            raise LineError("the regions of its memory are others")
        there = ask.places(load.line, load.claim, load.keys)
        batch = LARGEST if self._staging is None else self._staging.slot_bytes
        for first, end in self._rows.batches(len(there), batch):
            part = load.pages[first:end]
            try:
                theirs, lengths = scattered(load.peer.regions, there[first:end])
            except IndexError as error:
                raise LineError(f"it names {error}") from None
            if self._staging is None:
                ours, _ = scattered(self._regions, part)
                self._batch(load, merged(ours, theirs, lengths), lambda motion: motion.drop())
            else:
                self._through(self._staging, load, theirs, lengths, part)
            load.good(end)
        if len(there) < len(load.keys):
            raise LeaseEnded(f"the peer has {len(there)} of {len(load.keys)} pages")

    def _through(self, staging: Staging, load: Load, theirs: Words, lengths: Words, part: Sequence[int]) -> None:
        """One batch, by way of the staging area."""
        slot = staging.take(self._stall, load.cancelled)
        stranded = False

        def strand(motion: Motion) -> None:
            nonlocal stranded
            if settled(motion, final=self._transport.failed_is_final):
                motion.drop()
            else:
                stranded = True
                staging.strand(slot, Limbo(load.peer.incarnation, motion))

        try:
            ours = staged(self._regions, len(part), slot.address)
            self._batch(load, merged(ours, theirs, lengths), strand)
            self._rows.unstage(slot.memory, part)
        finally:
            if not stranded:
                staging.give(slot)

    def _batch(self, load: Load, pieces: tuple[Words, Words, Words], give_up: Callable[[Motion], None]) -> None:
        """Move pieces; return if the peer held them until they were there. Raises ``LineError``.

        Args:
            give_up: does what is to be done with a motion that has not ended well.
        """
        transport, peer = self._transport, load.peer.incarnation
        for portion in portions(pieces, transport.most):
            try:
                motion = transport.begin(peer, *portion)
            except TransportError as error:
                transport.disconnect(peer)
                raise MotionFailed(f"{transport.name}: {error}") from None
            try:
                self._watch(load, motion)
            except BaseException as error:
                give_up(motion)
                if isinstance(error, MotionFailed):
                    transport.disconnect(peer)
                raise
            motion.drop()
        if not ask.renew(load.line, load.claim):
            raise LeaseEnded("the peer's lease ended while its pages were read")

    def _watch(self, load: Load, motion: Motion) -> None:
        """Wait for a motion's end. Raises ``LineError`` where it has not moved all bytes."""
        renewed = time.monotonic()
        for now in looks(motion, self._transport.name, self._stall):
            if load.cancelled():
                raise LineError("cancelled")
            if now - renewed > load.peer.lease / 3:
                if not ask.renew(load.line, load.claim):
                    raise LeaseEnded("the peer's lease ended while its pages were read")
                renewed = now


class Pushed:
    """The sender's transport writes into the staging area; what it says it has written is copied from there."""

    def __init__(self, rows: Rows, staging: Staging, stall: float, *, checked: bool) -> None:
        self._rows, self._staging, self._stall, self._checked = rows, staging, stall, checked

    def move(self, load: Load) -> None:
        """See ``Mover``."""
        for number in self._staging.promised(load.peer.incarnation):  # what was given up earlier
            if not ask.revoke(load.line, number):
                self._staging.over(load.peer.incarnation, [number])
        for first, end in self._rows.batches(len(load.keys), self._staging.slot_bytes):
            slot = self._staging.take(self._stall, load.cancelled)
            count = self._batch(load, slot, first, end)
            load.good(first + count)
            if count < end - first:
                raise LeaseEnded(f"the peer has {first + count} of {len(load.keys)} pages")

    def _batch(self, load: Load, slot: Slot, first: int, end: int) -> int:
        """Fill some pages; how many were filled. The slot is free afterwards, or in limbo."""
        number = secrets.randbits(63) | 1
        limbo: Limbo | None = Limbo(load.peer.incarnation, number=number)
        try:
            count, told = ask.want(
                load.line, number, load.claim, slot.offset, load.keys[first:end], checked=self._checked
            )
            memory = slot.memory[: count * self._rows.page_bytes]
            if self._checked and zlib.crc32(memory.data) != told:
                limbo = Limbo(load.peer.incarnation)  # it was said to be there and is not: nobody knows when it comes
                raise LineError(f"the bytes of pages {first} to {first + count} do not fit their checksum")
            limbo = None
            self._rows.unstage(memory, load.pages[first : first + count])
            return count
        except LeaseEnded:
            limbo = None
            raise
        except ask.NotSent as error:
            limbo = None if error.over else limbo
            raise
        finally:
            if limbo is None:
                self._staging.give(slot)
            else:
                self._staging.strand(slot, limbo)


class Movers:
    """Chooses a mover for a peer. Any thread may call.

    Args:
        name: the connector's, for messages.
        style: how the transport moves bytes, ``pulled`` or ``pushed``; ``streamed`` without one.
        streams: pages may also come over the line, where the transport cannot reach the peer.

    Attribute ``detours``: loads that came over the line although there is a transport.
    """

    def __init__(self, name: str, transport: Transport | None, streamed: Streamed, staging: Staging | None,
                 rows: Rows, stall: float, *, receives: bool, streams: bool, checked: bool) -> None:  # fmt: skip
        self._name, self._transport, self._streamed, self._streams = name, transport, streamed, streams
        self._mover: Mover = streamed
        self.style = "streamed"
        if transport is not None and transport.pushes:
            self.style = "pushed"
            if receives and staging is not None:
                self._mover = Pushed(rows, staging, stall, checked=checked)
        elif transport is not None:
            self.style, self._mover = "pulled", Pulled(rows, transport, staging, stall)
        self._said: set[str] = set()
        self.detours = 0

    def move(self, load: Load) -> None:
        """Fill the pages by what reaches the peer. Raises as ``Mover.move`` does."""
        have = 0

        def good(count: int) -> None:
            nonlocal have
            have = count
            load.good(count)

        try:
            self._for(load.peer).move(replace(load, good=good))
        except (MotionFailed, Unreachable) as error:
            if not self._streams or load.cancelled():
                raise
            self._detour(load.peer, error)
            rest = replace(
                load, keys=load.keys[have:], pages=load.pages[have:], good=lambda count: load.good(have + count)
            )
            self._streamed.move(rest)

    # ---- inside

    def _for(self, peer: Identity) -> Mover:
        """Who moves pages from this peer to here. Raises ``Unreachable``."""
        if self._streams and (self.style == "streamed" or not peer.card):
            return self._streamed
        if peer.mover != self.style:
            raise Unreachable(f"pages are {peer.mover} there and {self.style} here")
        if self.style == "pulled" and self._transport is not None:
            try:
                self._transport.connect(peer.incarnation, peer.card)
            except TransportError as error:
                raise Unreachable(f"{self._transport.name}: {error}") from None
        return self._mover

    def _detour(self, peer: Identity, error: LineError) -> None:
        self.detours += 1
        if peer.incarnation not in self._said:
            self._said = {*self._said, peer.incarnation} if len(self._said) < 256 else {peer.incarnation}
            log.info("connector %s: pages of %s come over the line: %s", self._name, peer.name, error)


class Unreachable(Refused):
    """The transport does not reach the peer."""

    well = True
