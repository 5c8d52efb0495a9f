"""Mooncake's transfer engine moves the bytes: it writes into the peer's memory over TCP.

What version 0.3.13.post1 was seen to do, with two processes on one host:

==========================  ============================================================================================
the target is killed        the first pieces fail within 0.3 s; those that still queue are tried one after the other
it is stopped               moving for 30 s, then failed
it goes on after ``drop``   **all bytes arrive**; also those of a motion that failed: what queues is still written
pieces out of range         refused by the target, which survives; the reason is in its log alone
many pieces                 of more than about 2,000 that a target has not taken yet some fail, in one batch or many
the blocking calls          wait in a loop that takes a whole processor. The form for batches that should not block
                            does so too, and ``transfer_check_status`` looks at a batch's first piece alone
several threads             fine
where it listens            on **all interfaces**, on two ports of its choice, whatever it is told
==========================  ============================================================================================

So every piece is submitted by itself, and asked for by itself: that is sound, as fast as a batch, and leaves the
processor to others. A target is never given more than ``WINDOW`` of them at once.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ConfigError
from engine.plugins.connectors._pieces import spans, within
from engine.plugins.connectors._transport import Motion, Transport, TransportError, Words

Piece = tuple[int, int, int]
"""Address here, address there, bytes."""

HINT = "connector mooncake needs mooncake: pip install 'sixhooks[mooncake]'"
RDMA = "libibverbs"
RDMA_HINT = "connector mooncake needs libibverbs, also where there is no RDMA: apt-get install libibverbs1"
FAILED = 2**64 - 1  # -1 as the library's number of a batch
GREETING = 5.0  # seconds that a peer has to take nothing
WINDOW = 1024  # pieces that a target has not taken yet


def library() -> Any:
    """The library's module. Raises ``ConfigError`` with what to install."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # read once, as it is loaded; it says what it does a line a batch
    try:
        return import_module("mooncake.engine")
    except ModuleNotFoundError:
        raise ConfigError(HINT) from None
    except ImportError as error:
        raise ConfigError(
            RDMA_HINT if RDMA in str(error) else f"connector mooncake: the library cannot be loaded: {error}"
        ) from error


class MooncakeTransport(Transport):
    """Push: writes into the peer's memory, each piece a request of the library's.

    Args:
        host: how peers reach this host.

    Raises:
        ConfigError: the library, or one that it needs, is not installed.
    """

    name: ClassVar[str] = "mooncake"
    pushes: ClassVar[bool] = True

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._library = library()
        self._host = host
        self._engine: Any = None
        self._held: list[tuple[int, int]] = []
        self._lock = threading.Lock()
        self._peers: dict[str, _Target] = {}
        self._left: list[_Target] = []  # disconnected, with pieces that they have not taken
        self._dropped: list[MooncakeMotion] = []  # nobody waits for them, and the library still holds some pieces

    def open(self, memory: Sequence[NDArray[np.uint8]]) -> str:
        """An engine of its own, which listens on two ports of its choice."""
        self._engine = engine = self._library.TransferEngine()
        if engine.initialize(self._host, "P2PHANDSHAKE", "tcp", ""):
            raise TransportError("mooncake: the transfer engine could not be started; its log says why")
        self._held = spans(memory)
        for start, length in self._held:
            if engine.register_memory(start, length):
                raise TransportError(f"mooncake: {length} bytes could not be registered")
        held = self._held or [(0, 0)]
        return json.dumps({"session": f"{self._host}:{engine.get_rpc_port()}", "address": held[0][0]})

    def connect(self, peer: str, card: str) -> None:
        """Learn what memory it has, and write nothing to it: a peer that is gone is found out here."""
        with self._lock:
            known = self._peers.get(peer)
        if known is not None and known.card == card:
            return
        try:
            said = json.loads(card)
            session, address = str(said["session"]), int(said["address"])
        except (ValueError, TypeError, KeyError):
            raise TransportError(f"mooncake: peer {peer}: its card makes no sense") from None
        with self._lock:
            target = next((one for one in self._left if one.card == card), None) or _Target(session, card)
        nothing = MooncakeMotion(self, target, [(self._held[0][0], address, 0)])
        until = time.monotonic() + GREETING
        while (state := nothing.state()) == "moving" and time.monotonic() < until:
            time.sleep(0.001)
        nothing.drop()
        if state != "done":
            raise TransportError(f"mooncake: peer {peer} at {session}: {nothing.reason or 'it does not answer'}")
        with self._lock:
            known = self._peers.get(peer)
            if known is None or known.card != card:  # else another thread was first, and pieces are counted there
                self._peers[peer] = target

    def disconnect(self, peer: str) -> None:
        """The library writes what it was told to write; motions that are open go on to say how that goes."""
        with self._lock:
            target = self._peers.pop(peer, None)
            self._left = [one for one in [*self._left, target] if one is not None and one.open]

    def begin(self, peer: str, ours: Words, theirs: Words, lengths: Words) -> MooncakeMotion:
        """The library's threads write; this one only hands the pieces over."""
        with self._lock:
            target = self._peers.get(peer)
        if target is None:
            raise TransportError(f"mooncake: peer {peer} is not connected")
        if not within(ours, lengths, self._held):
            raise TransportError("mooncake: pieces outside of the memory that is registered here")
        self._reap()
        return MooncakeMotion(self, target, list(zip(ours.tolist(), theirs.tolist(), lengths.tolist(), strict=True)))

    def close(self) -> None:
        """End the engine, its threads and ports."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        with self._lock:
            self._peers.clear()
            self._dropped.clear()
        for start, _ in self._held:
            engine.unregister_memory(start)

    # ---- inside

    def _submit(self, target: _Target, piece: Piece) -> int:
        """The library's number of the piece, or ``FAILED``."""
        number = int(self._engine.transfer_submit_write(target.session, *piece))
        return FAILED if number in (0, -1) else number

    def _ended(self, number: int) -> int:
        """1: arrived, -1: failed, 0: neither. The library forgets the number with the first two."""
        said = self._engine.transfer_check_status(number)
        return said if said in (1, -1) else 0

    def _reap(self) -> None:
        """What nobody waits for is asked for until the library has ended it: only then does it free it."""
        with self._lock:
            self._dropped = [motion for motion in self._dropped if not motion.over()]


class MooncakeMotion(Motion):
    """Pieces in order: those that wait here, and those that the library has."""

    def __init__(self, transport: MooncakeTransport, target: _Target, pieces: list[Piece]) -> None:
        self._transport, self._target = transport, target
        self._waiting = pieces[::-1]
        self._numbers: deque[int] = deque()
        self._state: Literal["moving", "done", "failed"] = "moving"
        self._feed()

    def state(self) -> Literal["moving", "done", "failed"]:
        """Ask for the first pieces that have not arrived yet, and hand over the next."""
        if self._state != "moving":
            return self._state
        if self._transport._engine is None:
            return self._failed("it was closed")
        if self._take():
            return self._failed("a write failed; its log says why")
        self._feed()
        if self._numbers and self._numbers[-1] == FAILED:
            return self._failed("the peer cannot be reached")
        if not (self._numbers or self._waiting):
            self._state = "done"
        return self._state

    def drop(self) -> None:
        """What the library has not ended yet is left to the transport; what it does not have yet never goes."""
        self._waiting = []
        if self._state == "moving":
            self._failed("it was dropped")
        if self._numbers:
            with self._transport._lock:
                self._transport._dropped.append(self)

    def over(self) -> bool:
        """Whether the library has ended every piece that it was given."""
        while self._take():
            pass
        return not self._numbers

    # ---- inside

    def _take(self) -> bool:
        """Forget the first pieces that have ended; whether one of them failed."""
        numbers, bad = self._numbers, False
        while numbers and not bad:
            ended = -1 if numbers[0] == FAILED else self._transport._ended(numbers[0])
            if not ended:
                break
            numbers.popleft()
            self._target.count(-1)
            bad = ended < 0
        return bad

    def _feed(self) -> None:
        """Hand over as many pieces as the target may have."""
        if self._waiting and self._target.open >= WINDOW:
            self._transport._reap()
        while self._waiting and self._target.open < WINDOW:
            self._target.count(1)
            self._numbers.append(self._transport._submit(self._target, self._waiting.pop()))
            if self._numbers[-1] == FAILED:
                self._waiting = []

    def _failed(self, reason: str) -> Literal["failed"]:
        self._waiting = []
        self._state, self.reason = "failed", f"mooncake: {reason}"
        return "failed"


class _Target:
    """A peer's engine. ``open``: pieces that it has not taken yet."""

    def __init__(self, session: str, card: str) -> None:
        self.session, self.card = session, card
        self.open = 0
        self._lock = threading.Lock()

    def count(self, more: int) -> None:
        """So many more. Mutates."""
        with self._lock:
            self.open += more
