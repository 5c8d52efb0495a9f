"""Hand-off from engine to engine: what all connectors share that do it, whatever moves the bytes.

One engine computes prompts, another goes on with them. The sender leases what it has computed: the core fences the
pages until the lease ends. The receiver finds, fetches and releases. Source: vLLM's NIXL connector (lease, hand-off
between prefill and decode), Mooncake's (push).

A request's metadata says what is to be done with it: ``kv_role: prefill`` (lease what you compute) to the one,
``kv_from: HOST:PORT`` (fetch it there) to the other.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

from engine.core.hookspecs import hookimpl
from engine.core.memory import KVLayout
from engine.core.plan import Transfer, TransferEvent
from engine.core.protocols import Connector, Context, ModelInfo
from engine.plugins.connectors._handoff_errands import Desk, Errand, Fetch, LetGo, LookUp, Tally
from engine.plugins.connectors._handoff_identity import Identity
from engine.plugins.connectors._handoff_leases import Leases
from engine.plugins.connectors._handoff_options import HandOffOptions
from engine.plugins.connectors._handoff_peers import Claim, Peers
from engine.plugins.connectors._handoff_rows import Rows
from engine.plugins.connectors._handoff_server import Server
from engine.plugins.connectors._handoff_wire import KEY
from engine.plugins.connectors._handoff_workers import Workers

FROM, ROLE, PREFILL = "kv_from", "kv_role", "prefill"  # hints
THREADS, THREADS_EACH = 16, 4  # that ask peers at once; that ask one peer


class HandOffConnector(Connector):
    """Hands KV from engine to engine. A subclass has a name, and what moves the bytes.

    Attribute ``address``: where peers find it, ``host:port``; empty where it only receives.
    """

    holds = True

    class Options(HandOffOptions):
        """As a subclass has them."""

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
        self._claims: dict[str, tuple[str, Claim]] = {}  # request -> its look-up, and what that found
        self._server: Server | None = None
        self._desk: Desk | None = None

    def start(self, context: Context) -> None:
        """Nothing is opened before ``register``."""
        self._model, self._page_size = context.model, context.limits.page_size

    def register(self, layout: KVLayout) -> None:
        """Listen. Raises ``ConfigError`` where that cannot be done."""
        self._layout = layout
        chosen, identity, rows = self.options, self._identity(), Rows(layout)
        wait, token = min(chosen.linger, chosen.patience / 4), chosen.token.get_secret_value()
        self._desk = Desk(
            self.name, Peers(identity, token, self._stall), rows, self._page_size, wait, chosen.checksum, self._tally,
            self._events.append, self._claimed, self._hold, self._let_go,
        )  # fmt: skip
        if self.saves:
            self._server = Server(
                chosen.host, chosen.port, identity, self._leases, rows,
                token=token, stall=self._stall, longest=chosen.lease_seconds,
            )  # fmt: skip
            self.address = self._server.address

    def describe(self) -> dict[str, str]:
        """Where peers find it, and who it is."""
        return {"address": self.address, "role": self.options.role, "incarnation": self.incarnation}

    def stats(self) -> dict[str, int | float]:
        """Leases and pages of both sides."""
        server = self._server
        return {
            "leases": len(self._leases),
            "leased_pages": self._leases.pages,
            "leases_released": self._leases.released,
            "leases_expired": self._leases.expired,
            "peers_refused": server.refused if server is not None else 0,
            "pages_given": server.given if server is not None else 0,
            "pages_taken": self._tally.taken,
            "errands_failed": self._tally.broken,
        }

    def weights_changed(self, model: ModelInfo) -> None:
        """Peers with the old weights are refused from now on; those with the new ones are asked anew."""
        self._model = model
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
                self._events.append(TransferEvent(wish.id, "failed", reason=reason))
            elif wish.kind == "push":
                self._push(wish)
            else:
                self._ask(wish)
        self._events.extend(TransferEvent(name, "done") for name in self._leases.collect())
        told = []
        while self._events:
            told.append(event := self._events.popleft())
            self._errands.pop(event.transfer_id, None)
        return told

    def close(self) -> None:
        """End every connection and thread. What peers have not fetched yet they must compute."""
        self._leases.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        for errand in list(self._errands.values()):
            errand.cancel()
        self._workers.close()
        if self._desk is not None:
            self._desk.peers.close()

    # ---- inside

    def _identity(self) -> Identity:
        return Identity(
            name=self.options.engine or f"engine {os.getpid()}", incarnation=self.incarnation,
            connector=self.name, lease=self.options.lease_seconds,
            layout=self._layout.digest, page_bytes=self._layout.page_bytes, page_size=self._page_size,
            model=self._model.name, fingerprint=self._model.fingerprint,
        )  # fmt: skip

    def _push(self, wish: Transfer) -> None:
        if self.saves and (self.options.lease == "all" or wish.hints.get(ROLE) == PREFILL):
            self._leases.add(wish)
        else:
            self._events.append(TransferEvent(wish.id, "done"))

    def _ask(self, wish: Transfer) -> None:
        """Send somebody to the peer that the request names."""
        address = wish.hints.get(FROM)
        if address is None and wish.kind == "probe":
            self._events.append(TransferEvent(wish.id, "found"))
        elif (reason := self._forbidden(address)) is not None:
            self._events.append(TransferEvent(wish.id, "failed", failed_pages=wish.pages, reason=reason))
        else:
            assert self._desk is not None
            assert isinstance(address, str)
            kind = LookUp if wish.kind == "probe" else Fetch
            errand = self._errands[wish.id] = kind(self._desk, address, wish)
            self._workers.add(errand)

    def _forbidden(self, address: object) -> str | None:
        """Why an address is not asked; ``None``: it is."""
        if not isinstance(address, str) or not address.rpartition(":")[2].isdecimal():
            return f"{FROM} is {address!r}: host:port is expected"
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
        probe, _ = self._claims.get(wish.request_id, ("", None))
        if probe == wish.of and (claim := self._claimed(wish.request_id)) is not None:
            self._let_go(claim)

    def _hold(self, wish: Transfer, claim: Claim) -> None:
        self._claims[wish.request_id] = wish.id, claim

    def _claimed(self, request_id: str) -> Claim | None:
        return self._claims.pop(request_id, ("", None))[1]

    def _let_go(self, claim: Claim) -> None:
        assert self._desk is not None
        self._workers.add(LetGo(self._desk, claim))


def _unfit(wish: Transfer) -> str | None:
    """Why a transfer makes no sense here; ``None``: it does."""
    if wish.kind != "probe" and len(wish.keys) != len(wish.pages):
        return f"{len(wish.keys)} keys for {len(wish.pages)} pages"
    if any(len(key) != KEY for key in wish.keys):
        return f"keys have {KEY} bytes"
    return None
