"""The sender's side of *pushed*: writes pages where a receiver wants them, and says what came of it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from engine.plugins.connectors import _handoff_wire as wire
from engine.plugins.connectors._handoff_identity import Identity
from engine.plugins.connectors._handoff_leases import Leases
from engine.plugins.connectors._handoff_movers import MotionFailed, looks
from engine.plugins.connectors._handoff_rows import Rows, merged, portions, scattered, staged
from engine.plugins.connectors._handoff_staging import settled
from engine.plugins.connectors._handoff_wire import Kind, Line, LineError
from engine.plugins.connectors._transport import Motion, Transport, TransportError, Words

HEARTBEAT = 0.1  # seconds between two signs of life
KNOWN = 256  # receivers that are connected at once
REMEMBERED = 1 << 16  # revoked wishes, against those that arrive after they were revoked


class PushFailed(Exception):
    """Why a receiver does not get what it wants. ``over``: nothing is written there any more."""

    def __init__(self, words: str, *, over: bool) -> None:
        super().__init__(words)
        self.over = over


class Pusher:
    """Writes into receivers' staging areas. Any thread may call; ``push`` takes as long as it takes.

    Args:
        stall: seconds after which a motion that has not ended is given up.
    """

    def __init__(self, transport: Transport, leases: Leases, rows: Rows, stall: float) -> None:
        self._transport, self._leases, self._rows, self._stall = transport, leases, rows, stall
        self._regions = rows.places()
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], Motion | None] = {}  # what may still be written, by receiver and number
        self._revoked: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._reached: OrderedDict[str, None] = OrderedDict()
        self._stopping = False

    def push(self, line: Line, peer: Identity, want: tuple[int, int, int, bool], keys: Sequence[bytes]) -> int:
        """Do what a WANT says (its numbers: ``wire.WANT``), and answer it. Raises ``LineError``.

        As long as this runs, the lease does not end. Returns how many pages were written.
        """
        number, claim, offset, checked = want
        name = (peer.incarnation, number)
        begun = self._leases.begin(claim, keys)
        if begun is None:
            line.send(Kind.EXPIRED)
            return 0
        hand_off, pages = begun
        well = False
        try:
            self._write(line, peer, name, offset, pages)
            told = self._rows.checksum(pages) if checked else 0
        except PushFailed as error:
            line.send(Kind.FAILED, wire.FAILED.pack(error.over) + str(error).encode())
            return 0
        else:
            line.send(Kind.DONE, wire.DONE.pack(len(pages), told))
            well = True
            return len(pages)
        finally:
            self._leases.end(hand_off, well=well)

    def revoke(self, receiver: str, number: int) -> bool:
        """Whether something may still be written for this wish of a receiver's. It does not begin now. Mutates."""
        with self._lock:
            self._revoked[receiver, number] = None
            while len(self._revoked) > REMEMBERED:
                self._revoked.popitem(last=False)
            if (receiver, number) not in self._open:
                return False
            motion = self._open[receiver, number]
            if motion is None or not settled(motion, final=self._transport.failed_is_final):
                return True
            motion.drop()
            del self._open[receiver, number]
            return False

    def stop(self) -> None:
        """Give up what is under way. Mutates."""
        self._stopping = True

    def close(self) -> None:
        """Nobody looks at what was given up any more. Mutates."""
        with self._lock:
            for motion in self._open.values():
                if motion is not None:
                    motion.drop()
            self._open.clear()

    # ---- inside

    def _write(self, line: Line, peer: Identity, name: tuple[str, int], offset: int, pages: Sequence[int]) -> None:
        """Write the pages, row by row, region by region. Raises ``PushFailed``."""
        transport, (address, size) = self._transport, peer.staging
        if offset + len(pages) * self._rows.page_bytes > size:
            raise PushFailed(f"{len(pages)} pages at {offset} of a staging area of {size} bytes", over=True)
        ours, lengths = scattered(self._regions, pages)
        pieces = merged(ours, staged(self._regions, len(pages), address + offset), lengths)
        with self._lock:
            if name in self._revoked:
                raise PushFailed("it was revoked", over=True)
            self._open[name] = None
        try:
            self._connect(peer)
            for portion in portions(pieces, transport.most):
                self._one(line, peer.incarnation, portion)
        except TransportError as error:  # nothing of this portion has begun, and those before it have ended
            transport.disconnect(peer.incarnation)
            self._over(name)
            raise PushFailed(f"{transport.name}: {error}", over=True) from None
        except _GivenUp as error:
            over = self._give_up(name, error.motion)
            transport.disconnect(peer.incarnation)
            raise PushFailed(str(error), over=over) from None
        self._over(name)

    def _connect(self, peer: Identity) -> None:
        """Reach a receiver; whoever was not reached for longest is forgotten. Raises ``TransportError``."""
        self._transport.connect(peer.incarnation, peer.card)
        with self._lock:
            self._reached[peer.incarnation] = None
            self._reached.move_to_end(peer.incarnation)
            old = self._reached.popitem(last=False)[0] if len(self._reached) > KNOWN else None
        if old is not None:
            self._transport.disconnect(old)

    def _one(self, line: Line, receiver: str, portion: tuple[Words, Words, Words]) -> None:
        """One motion, to its end, also where nobody listens any more. Raises ``TransportError``, ``_GivenUp``."""
        motion = self._transport.begin(receiver, *portion)
        told, name = time.monotonic(), self._transport.name
        try:
            for now in looks(motion, name, self._stall):
                if self._stopping:
                    raise MotionFailed(f"{name}: the engine is being closed")
                if now - told > HEARTBEAT:
                    told = now
                    try:
                        line.send(Kind.BUSY)
                    except LineError:
                        told = float("inf")
        except MotionFailed as error:
            raise _GivenUp(str(error), motion) from None
        motion.drop()

    def _over(self, name: tuple[str, int]) -> None:
        with self._lock:
            del self._open[name]

    def _give_up(self, name: tuple[str, int], motion: Motion) -> bool:
        """Whether nothing of it is written any more."""
        with self._lock:
            over = not self._transport.late_writes or settled(motion, final=self._transport.failed_is_final)
            if over:
                del self._open[name]
            elif motion.state() == "moving":
                self._open[name] = motion  # its end may still be seen
                return False
            motion.drop()
            return over


class _GivenUp(Exception):
    def __init__(self, words: str, motion: Motion) -> None:
        super().__init__(words)
        self.motion = motion
