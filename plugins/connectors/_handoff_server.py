"""The sender: listens, and gives peers what is leased, straight out of KV memory."""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import struct
import threading
import time

from engine.core.errors import ConfigError
from engine.plugins.connectors import _handoff_wire as wire
from engine.plugins.connectors._handoff_identity import Identity, greeting, proof, proves
from engine.plugins.connectors._handoff_leases import Leases
from engine.plugins.connectors._handoff_pusher import Pusher
from engine.plugins.connectors._handoff_rows import Rows, checksum
from engine.plugins.connectors._handoff_wire import Kind, Line, LineError

log = logging.getLogger(__name__)

MOST = 64  # peers' connections at once, each with a thread
IDLE = 120.0  # seconds after which a connection without questions is closed
WAIT = 30.0  # most seconds that a peer may have us wait for pages that are not computed yet
GOODBYE = 5.0  # seconds that a thread has to end


class Server:
    """Answers peers until ``close``.

    Args:
        host: address to listen on.
        port: 0 takes any free one; ``address`` tells which.
        identity: what peers are told of this engine.
        token: what peers must know; empty: nothing.
        stall: seconds without a byte after which a peer is given up.
        longest: seconds after which a read is broken off, however well it goes.
        pusher: writes pages to receivers; ``None``: they fetch them.

    Attributes: ``given``, pages that receivers were sent, were told the places of, or had written to them; ``refused``,
    peers turned away.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(
        self, host: str, port: int, identity: Identity, leases: Leases, rows: Rows, *,
        token: str, stall: float, longest: float, pusher: Pusher | None = None,
    ) -> None:  # fmt: skip
        self._name = identity.connector
        self._leases, self._rows, self._pusher = leases, rows, pusher
        self._token, self._stall, self._longest = token, stall, longest
        self._lines: dict[Line, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closing = False
        self.given = self.refused = 0
        try:
            self._listener = socket.create_server((host, port), backlog=MOST, family=_family(host))
        except OSError as error:
            raise ConfigError(
                f"connector {identity.connector}: cannot listen on {host}:{port}: {error.strerror or error}"
            ) from error
        name = self._listener.getsockname()
        self.address = f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
        self.identity = identity
        self._bell, self._ear = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name=f"engine-{self._name}-door", daemon=True)
        self._thread.start()

    def rename(self, identity: Identity) -> None:
        """Be somebody else from now on: whoever is connected must ask again."""
        self.identity = identity
        self._cut_all()

    def close(self) -> None:
        """End all connections and threads."""
        self._closing = True
        self._bell.send(b"!")
        self._thread.join(GOODBYE)
        self._cut_all()
        with self._lock:
            threads = list(self._lines.values())
        for thread in threads:
            thread.join(GOODBYE)
        for each in (self._listener, self._bell, self._ear):
            each.close()

    # ---- inside

    def _cut_all(self) -> None:
        with self._lock:
            for line in self._lines:
                line.cut()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._ear, selectors.EVENT_READ)
            while not self._closing:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._listener in ready and not self._closing:
                    self._let_in()

    def _let_in(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the peer is gone already, or there are no file descriptors left
            log.warning("connector %s: a peer could not be let in: %s", self._name, error)
            time.sleep(0.05)
            return
        line = Line(sock, self._stall)
        with self._lock:
            full = len(self._lines) >= MOST
            if not full:
                thread = threading.Thread(
                    target=self._serve, args=(line,), name=f"engine-{self._name}-peer", daemon=True
                )
                self._lines[line] = thread
                thread.start()
        if full:
            self.refused += 1
            line.close()

    def _serve(self, line: Line) -> None:
        try:
            peer = self._greet(line)
            line.socket.settimeout(IDLE)
            while not self._closing:
                kind, body = line.receive()
                line.socket.settimeout(self._stall)
                self._answer(line, peer, kind, body)
                line.socket.settimeout(IDLE)
        except LineError as error:
            log.debug("connector %s: a peer's connection ended: %s", self._name, error)
        except Exception:
            log.exception("connector %s: a peer's question could not be answered", self._name)
        finally:
            with self._lock:
                self._lines.pop(line, None)
                line.close()

    def _greet(self, line: Line) -> Identity:
        """Agree on who is who. Raises ``LineError``."""
        nonce = secrets.token_hex(16)
        line.send(Kind.GREETING, greeting(nonce))
        kind, body = line.receive(wire.SHORT)
        said = wire.parsed(body)
        if kind is not Kind.HELLO:
            raise LineError(f"it says {kind.name} first")
        peer, words = None, "the token is another one"
        if not self._token or proves(said, self._token, nonce):
            peer = Identity.heard(said)
            words = peer.quarrel(self.identity)
        if words or peer is None:
            self.refused += 1
            log.warning("connector %s: a peer was refused and told: %s", self._name, words)
            line.send(Kind.REFUSED, words.encode())
            raise LineError(words)
        line.send(Kind.WELCOME, self.identity.told(proof=proof(self._token, str(said.get("nonce")))))
        return peer

    def _answer(self, line: Line, peer: Identity, kind: Kind, body: bytes) -> None:
        leases, size = self._leases, len(body)
        if kind is Kind.PREFIX and size >= wire.PREFIX.size:
            self._find(line, body)
        elif kind is Kind.READ and size >= wire.READ.size:
            claim, checked = wire.READ.unpack_from(body)
            self._give(line, claim, wire.split_keys(body[wire.READ.size :]), checked=checked)
        elif kind is Kind.PLACES and size >= wire.CLAIM.size:
            (claim,) = wire.CLAIM.unpack_from(body)
            pages = leases.places(claim, wire.split_keys(body[wire.CLAIM.size :]))
            self.given += len(pages or ())
            line.send(*((Kind.EXPIRED,) if pages is None else (Kind.PLACED, struct.pack(f">{len(pages)}I", *pages))))
        elif kind is Kind.WANT and size >= wire.WANT.size and self._pusher is not None:
            keys = wire.split_keys(body[wire.WANT.size :])
            self.given += self._pusher.push(line, peer, wire.WANT.unpack_from(body), keys)
        elif kind is Kind.REVOKE and size == wire.CLAIM.size and self._pusher is not None:
            open_yet = self._pusher.revoke(peer.incarnation, *wire.CLAIM.unpack(body))
            line.send(Kind.HELD if open_yet else Kind.EXPIRED)
        elif kind in (Kind.RENEW, Kind.RELEASE) and size == wire.CLAIM.size:
            ask = leases.renew if kind is Kind.RENEW else leases.release
            line.send(Kind.HELD if ask(*wire.CLAIM.unpack(body)) else Kind.EXPIRED)
        else:
            raise LineError(f"it asks {kind.name} with {size} bytes")

    def _find(self, line: Line, body: bytes) -> None:
        """Claim pages. Where whoever asked has gone meanwhile, nobody would ever release the claim."""
        claim, enough, wait = wire.PREFIX.unpack_from(body)
        keys = wire.split_keys(body[wire.PREFIX.size :])
        found, count = self._leases.find(keys, min(wait / 1000, WAIT), enough, claim)
        if line.stale:
            self._leases.release(found)
            raise LineError("it did not wait for the answer")
        line.send(Kind.FOUND, wire.FOUND.pack(found, count))

    def _give(self, line: Line, claim: int, keys: list[bytes], *, checked: bool) -> None:
        """Send pages, in order. As long as this runs, their lease does not end."""
        begun = self._leases.begin(claim, keys)
        if begun is None:
            line.send(Kind.EXPIRED)
            return
        hand_off, pages = begun
        until = time.monotonic() + self._longest
        well = False
        try:
            line.send(Kind.GIVING, wire.GIVING.pack(len(pages)))
            for first, end in self._rows.batches(len(pages)):
                rows = self._rows.of(pages[first:end])
                head = wire.PAGES.pack(first, end - first, checksum(rows) if checked else 0)
                line.send(Kind.PAGES, head, rows, until)
                self.given += end - first
            line.send(Kind.END)
            well = True
        finally:
            self._leases.end(hand_off, well=well)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
