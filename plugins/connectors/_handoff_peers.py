"""The receiver's side of the wire: connections to peers, kept for the next time, and which peers not to ask for now."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.plugins.connectors import _handoff_wire as wire
from engine.plugins.connectors._handoff_identity import Identity, proof, proves
from engine.plugins.connectors._handoff_wire import Kind, Line, LineError, Refused

KNOWN = 256  # peers that are remembered
KEPT = 4  # idle connections that are kept a peer
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds for which a peer that failed is left alone: doubled each time


@dataclass(slots=True)
class Peer:
    """What is known of an address."""

    identity: Identity | None = None
    idle: deque[Line] = field(default_factory=deque)
    failures: int = 0  # in a row
    ask_again: float = 0.0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """Pages that a peer holds for us. ``lease``: seconds that it does so without hearing from us."""

    address: str
    incarnation: str
    number: int
    lease: float


class Peers:
    """Connections to engines by address. Any thread may call.

    Args:
        identity: what they are told of this engine.
        token: what they must know; empty: nothing.
        stall: seconds without a byte after which a peer is given up.
        left: told of incarnations that are not known any more, and whether another one has taken their place.
    """

    def __init__(
        self, identity: Identity, token: str, stall: float, left: Callable[[str, bool], None] = lambda *_: None
    ) -> None:
        self._identity, self._token, self._stall, self._left = identity, token, stall, left
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, Peer] = OrderedDict()

    def trouble(self, address: str) -> str:
        """Why the peer is not to be asked now; empty: ask. After a pause one asks, to see whether it is well again."""
        with self._lock:
            peer = self._peers.get(address)
            now = time.monotonic()
            if peer is None or not peer.failures:
                return ""
            if now < peer.ask_again:
                return f"{peer.trouble} (asked again in {peer.ask_again - now:.1f} s)"
            peer.ask_again = now + self._stall
            return ""

    def failed(self, address: str, error: LineError) -> None:
        """Leave the peer alone for a while, and forget its connections. Mutates."""
        with self._lock:
            peer = self._peer(address)
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**peer.failures)
            peer.failures = min(peer.failures + 1, 16)
            peer.ask_again = time.monotonic() + pause
            peer.trouble = str(error)
            self._forget(peer)
        self._thin_out()

    def take(self, address: str, using: Callable[[Line], None]) -> tuple[Line, Identity]:
        """A connection to nobody else's use, and who the peer is. Raises ``LineError``.

        Args:
            using: told of the connection before anything can block on it.
        """
        with self._lock:
            peer = self._peer(address)
            while peer.idle:
                line = peer.idle.pop()
                if not line.stale and peer.identity is not None:
                    using(line)
                    return line, peer.identity
                line.close()
        line = self._connect(address)
        try:
            using(line)
            identity = self._greet(line)
        except BaseException:
            line.close()
            raise
        with self._lock:
            peer = self._peer(address)
            before = peer.identity
            if before != identity:
                self._forget(peer)
                peer.identity = identity
            peer.failures = 0
        if before is not None and before.incarnation != identity.incarnation:
            self._left(before.incarnation, True)
        self._thin_out()
        return line, identity

    def give(self, address: str, line: Line, identity: Identity) -> None:
        """Keep a connection on which nothing is open for the next one. Mutates."""
        with self._lock:
            peer = self._peers.get(address)
            if peer is not None and peer.identity == identity and len(peer.idle) < KEPT:
                peer.idle.append(line)
                return
        line.close()

    def rename(self, identity: Identity) -> None:
        """Be somebody else from now on. Mutates."""
        with self._lock:
            self._identity = identity
            for peer in self._peers.values():
                self._forget(peer)
                peer.failures = 0

    def close(self) -> None:
        """Close what is idle, and forget everybody. Mutates."""
        with self._lock:
            for peer in self._peers.values():
                self._forget(peer)
            self._peers.clear()

    # ---- inside

    def _peer(self, address: str) -> Peer:
        peer = self._peers.setdefault(address, Peer())
        self._peers.move_to_end(address)
        return peer

    def _thin_out(self) -> None:
        """Forget those that were not asked for longest, if there are too many."""
        with self._lock:
            crowd = [self._peers.popitem(last=False)[1] for _ in range(len(self._peers) - KNOWN)]
        for peer in crowd:
            self._forget(peer)
            if peer.identity is not None:
                self._left(peer.identity.incarnation, False)

    @staticmethod
    def _forget(peer: Peer) -> None:
        while peer.idle:
            peer.idle.pop().close()

    def _connect(self, address: str) -> Line:
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host.strip("[]"), int(port)), timeout=self._stall)
        except (OSError, ValueError, OverflowError) as error:
            raise LineError(f"no connection to {address}: {getattr(error, 'strerror', None) or error}") from None
        return Line(sock, self._stall)

    def _greet(self, line: Line) -> Identity:
        kind, body = line.receive(wire.SHORT)
        said = wire.parsed(body)
        if kind is not Kind.GREETING:
            raise LineError(f"it says {kind.name} first")
        if said.get("protocol") != wire.PROTOCOL:
            raise Refused(f"protocol is {said.get('protocol')!r} there and {wire.PROTOCOL} here")
        nonce = secrets.token_hex(16)
        hello = self._identity.told(nonce=nonce, proof=proof(self._token, str(said.get("nonce"))))
        _, body = line.ask(Kind.HELLO, hello, Kind.WELCOME)
        said = wire.parsed(body)
        if self._token and not proves(said, self._token, nonce):
            raise Refused("it does not know the token")
        other = Identity.heard(said)
        if words := self._identity.quarrel(other):
            raise Refused(words)
        return other
