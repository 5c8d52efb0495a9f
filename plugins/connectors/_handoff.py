"""Hand-off from engine to engine: what all connectors share that do it, whatever moves the bytes.

One engine computes prompts, another goes on with them. The sender leases what it has computed: the core fences the
pages until the lease ends. The receiver finds, fetches and releases. Source: vLLM's NIXL connector (lease, hand-off
between prefill and decode; one waits for the other's KV), Mooncake's (push), SGLang's queues (pages are taken while the
other is still computing).
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

from engine.core.hookspecs import hookimpl
from engine.core.memory import KVLayout
from engine.core.plan import Transfer, TransferEvent
from engine.core.protocols import Connector, Context, ModelInfo
from engine.plugins.connectors._handoff_claims import Claims
from engine.plugins.connectors._handoff_desk import Desk, Tally
from engine.plugins.connectors._handoff_errands import Decline, Errand, Fetch, Follow, LetGo, LookUp, Renew
from engine.plugins.connectors._handoff_hints import FROM, BadHint, Hints, read_hints
from engine.plugins.connectors._handoff_identity import Identity
from engine.plugins.connectors._handoff_leases import Leases
from engine.plugins.connectors._handoff_options import HandOffOptions
from engine.plugins.connectors._handoff_peers import Claim, Peers
from engine.plugins.connectors._handoff_road import Road
from engine.plugins.connectors._handoff_rows import Rows
from engine.plugins.connectors._handoff_server import Server
from engine.plugins.connectors._handoff_wire import KEY
from engine.plugins.connectors._handoff_workers import Workers
from engine.plugins.connectors._transport import Transport

THREADS, THREADS_EACH = 16, 4  # that ask peers at once; that ask one peer
NEARLY = 0.9  # of the patience: what has not come by then is left out, so that what has come is used


class HandOffConnector(Connector):
    """Hands KV from engine to engine. A subclass has a name, options, and a library that moves the bytes.

    Class attribute ``streams``: pages may also travel over the connection itself, where there is no library, or where
    it does not reach the peer.

    Attribute ``address``: where peers find it, ``host:port``; empty where it only receives.
    """

    holds = True
    streams: ClassVar[bool] = False

    class Options(HandOffOptions):
        """As a subclass has them: ``StagedOptions``, where its library may write late."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        chosen = self.options
        self.loads, self.saves = chosen.role != "prefill", chosen.role != "decode"
        self.patience, self.min_tokens = chosen.patience, chosen.min_tokens
        self.saving_share = chosen.saving_share
        self.address = ""
        self.incarnation = secrets.token_hex(8)
        self._stall = chosen.patience / 2  # a peer that is silent for so long leaves time to compute instead
        self._leases = Leases(chosen.lease_seconds)
        self._workers = Workers(self.name, THREADS, THREADS_EACH)
        self._tally = Tally()
        self._events: deque[TransferEvent] = deque()
        self._errands: dict[str, Errand] = {}
        self._claims = Claims()
        self._server: Server | None = None
        self._desk: Desk | None = None
        self._road: Road | None = None
        self._transport = self.transport_factory()

    def transport_factory(self) -> Transport | None:
        """The library that moves the bytes; ``None``: none, they are streamed. Called once, at construction.

        Raises ``ConfigError`` with an install hint where the library is missing.
        """
        return None

    def start(self, context: Context) -> None:
        """Nothing is opened before ``register``."""
        self._model, self._page_size = context.model, context.limits.page_size

    def register(self, layout: KVLayout) -> None:
        """Listen. Raises ``ConfigError`` where that cannot be done, or the library cannot work with this memory."""
        self._layout = layout
        chosen, rows, token = self.options, Rows(layout), self.options.token.get_secret_value()
        self._road = road = Road(
            self.name, self._transport, rows, receives=self.loads, users=THREADS, stall=self._stall,
            staging=getattr(chosen, "staging", ""), streams=self.streams, checked=chosen.checksum,
        )  # fmt: skip
        identity = self._identity()
        self._desk = Desk(
            self.name, Peers(identity, token, self._stall, road.left), road.movers, self._page_size, self._stall,
            self._tally, self._events.append, self._claims.use, self._claims.keep, self._let_go,
        )  # fmt: skip
        if self.saves:
            self._server = Server(
                chosen.host, chosen.port, identity, self._leases, rows, token=token, stall=self._stall,
                longest=chosen.lease_seconds, pusher=road.pusher(self._leases),
            )  # fmt: skip
            self.address = self._server.address

    def describe(self) -> dict[str, str]:
        """Where peers find it, who it is, and how its pages travel."""
        return {
            "address": self.address, "role": self.options.role, "incarnation": self.incarnation,
            "mover": self._road.movers.style if self._road is not None else "",
        }  # fmt: skip

    def stats(self) -> dict[str, int | float]:
        """Leases and pages of both sides."""
        server, road = self._server, self._road
        return {
            "leases": len(self._leases),
            "leased_pages": self._leases.pages,
            "leases_released": self._leases.released,
            "leases_expired": self._leases.expired,
            "peers_refused": server.refused if server is not None else 0,
            "pages_given": server.given if server is not None else 0,
            "pages_taken": self._tally.taken,
            "errands_failed": self._tally.broken,
            "detours": road.movers.detours if road is not None else 0,
            "slots_in_limbo": road.slots_in_limbo if road is not None else 0,
        }

    def weights_changed(self, model: ModelInfo) -> None:
        """Leases end: what the old ones computed is of no use to anybody. Peers with the old weights are refused from
        now on; those with the new ones are asked anew."""
        self._model = model
        self._leases.void()
        if self._desk is not None:
            self._desk.peers.rename(self._identity())
        if self._server is not None:
            self._server.rename(self._identity())

    @hookimpl
    def transfer_kv(self, transfers: Sequence[Transfer]) -> Sequence[TransferEvent]:
        """Begin what is asked for; tell what has ended: errands, and leases by release or time."""
        for wish in transfers:
            if wish.kind == "cancel":
                self._cancel(wish)
            elif (reason := _unfit(wish)) is not None:
                self._fail(wish, reason)
            else:
                self._begin(wish)
        for claim in self._claims.due(time.monotonic()):
            self._workers.add(Renew(self._at(), claim))
        self._events.extend(TransferEvent(name, "done") for name in self._leases.collect())
        told = []
        while self._events:
            told.append(event := self._events.popleft())
            self._errands.pop(event.transfer_id, None)
        return told

    def close(self) -> None:
        """End every connection and thread. What peers have not fetched yet they must compute."""
        self._leases.close()
        if self._road is not None:
            self._road.stop()
        if self._server is not None:
            self._server.close()
            self._server = None
        for errand in list(self._errands.values()):
            errand.cancel()
        self._workers.close()
        if self._desk is not None:
            self._desk.peers.close()
        if self._road is not None:
            self._road.close()

    # ---- inside

    def _identity(self) -> Identity:
        assert self._road is not None
        return Identity(
            name=self.options.engine or f"engine {os.getpid()}", incarnation=self.incarnation, connector=self.name,
            layout=self._layout.digest, page_bytes=self._layout.page_bytes, page_size=self._page_size,
            model=self._model.name, fingerprint=self._model.fingerprint, lease=self.options.lease_seconds,
            **self._road.told(),
        )  # fmt: skip

    def _at(self) -> Desk:
        assert self._desk is not None
        return self._desk

    def _fail(self, wish: Transfer, reason: str) -> None:
        self._events.append(TransferEvent(wish.id, "failed", failed_pages=wish.pages, reason=reason))

    def _begin(self, wish: Transfer) -> None:
        """Lease what is handed on; send somebody to the peer that the request names."""
        try:
            hints = read_hints(wish.hints)
        except BadHint as error:
            self._fail(wish, str(error))
            return
        if wish.kind == "push":
            if self.saves and (self.options.lease == "all" or hints.leases(self.name)):
                self._leases.add(wish)
            else:
                self._events.append(TransferEvent(wish.id, "done"))
        elif not hints.fetches(self.name):
            if wish.kind == "probe":
                self._events.append(TransferEvent(wish.id, "found"))
            else:
                self._fail(wish, f"{FROM} names no peer of connector {self.name}")
        elif (reason := self._forbidden(hints.address)) is not None:
            self._fail(wish, reason)
        else:
            self._ask(wish, hints)

    def _ask(self, wish: Transfer, hints: Hints) -> None:
        desk, now = self._at(), time.monotonic()
        if wish.kind == "probe" and hints.expected:
            self._claims.expect(wish, hints.address, now + NEARLY * self.patience)
            self._events.append(TransferEvent(wish.id, "found", tokens=len(wish.keys) * self._page_size))
            return
        errand: Errand
        if wish.kind == "probe":
            linger = min(self.options.linger, self.patience / 4)
            wait = linger if hints.wait is None else min(hints.wait, NEARLY * self.patience)
            errand = LookUp(desk, hints.address, wish, wait)
        elif (until := self._claims.expected(wish.request_id)) is not None:
            errand = Follow(desk, hints.address, wish, until)
        else:
            errand = Fetch(desk, hints.address, wish)
        self._errands[wish.id] = errand
        self._workers.add(errand)

    def _forbidden(self, address: str) -> str | None:
        """Why an address is not asked; ``None``: it is."""
        host = address.rpartition(":")[0].strip("[]")
        if host in self.options.peers or "*" in self.options.peers:
            return None
        return f"{FROM} names host {host!r}, which is not among the peers of this engine"

    def _cancel(self, wish: Transfer) -> None:
        errand = self._errands.get(wish.of)
        if errand is not None:
            errand.cancel()
            if self._workers.withdraw(lambda job: job is errand):
                errand.ended("cancelled")
        left = self._claims.decline(wish)
        if isinstance(left, Claim):
            self._let_go(left)
        elif left is not None:
            self._workers.add(Decline(self._at(), *left))

    def _let_go(self, claim: Claim) -> None:
        self._workers.add(LetGo(self._at(), claim))


def _unfit(wish: Transfer) -> str | None:
    """Why a transfer makes no sense here; ``None``: it does."""
    if wish.kind != "probe" and len(wish.keys) != len(wish.pages):
        return f"{len(wish.keys)} keys for {len(wish.pages)} pages"
    if any(len(key) != KEY for key in wish.keys):
        return f"keys have {KEY} bytes"
    return None
