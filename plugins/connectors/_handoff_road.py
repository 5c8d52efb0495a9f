"""What a connector's library needs and gives: registered memory, a staging area, movers, a pusher."""

from __future__ import annotations

import logging
from typing import Any

from engine.core.config import parse_bytes
from engine.core.errors import ConfigError
from engine.plugins.connectors._handoff_leases import Leases
from engine.plugins.connectors._handoff_movers import Movers, Streamed
from engine.plugins.connectors._handoff_pusher import Pusher
from engine.plugins.connectors._handoff_rows import Rows
from engine.plugins.connectors._handoff_staging import Staging
from engine.plugins.connectors._transport import Transport, TransportError

log = logging.getLogger(__name__)


class Road:
    """How pages travel: by the transport, if there is one, or over the line.

    Args:
        name: the connector's, for messages.
        receives: whether pages come in here.
        staging: size of the area that the transport writes to; only asked for where it needs one.
        users: how many loads there may be at once.
        streams: pages may also go over the line.
        checked: compare bytes with checksums.

    Raises:
        ConfigError: the transport cannot work here.
    """

    def __init__(
        self, name: str, transport: Transport | None, rows: Rows, *, receives: bool, users: int, stall: float,
        staging: str, streams: bool, checked: bool,
    ) -> None:  # fmt: skip
        self._name, self._rows, self._stall = name, rows, stall
        self._transport = transport if rows.page_bytes else None  # without bytes there is nothing to move but keys
        self._staging: Staging | None = None
        self._pusher: Pusher | None = None
        self._card = ""
        if self._transport is not None:
            if receives and (self._transport.pushes or self._transport.late_writes):
                self._staging = self._area(self._transport, staging, users)
            self._open(self._transport, streams=streams)
        streamed = Streamed(rows, checked=checked)
        self.movers = Movers(
            name, self._transport, streamed, self._staging, rows, stall, receives=receives, streams=streams,
            checked=checked,
        )  # fmt: skip

    @property
    def slots_in_limbo(self) -> int:
        """Parts of the staging area that something may still write to."""
        return 0 if self._staging is None else self._staging.in_limbo

    def told(self) -> dict[str, Any]:
        """What peers must know of it: fields of ``Identity``."""
        if self._transport is None:
            return {}
        area = self._staging
        return {
            "mover": self.movers.style, "card": self._card,
            "regions": () if self._transport.pushes else self._rows.places(),
            "staging": (0, 0) if area is None else (area.address, area.area.nbytes),
        }  # fmt: skip

    def pusher(self, leases: Leases) -> Pusher | None:
        """Writes leased pages to receivers, if that is how they travel."""
        if self._transport is not None and self._transport.pushes:
            self._pusher = Pusher(self._transport, leases, self._rows, self._stall)
        return self._pusher

    def left(self, incarnation: str, replaced: bool) -> None:
        """A peer is not known any more; if it is ``replaced``, its process is gone. Mutates."""
        if self._transport is not None:
            self._transport.disconnect(incarnation)
            if replaced and self._staging is not None:
                self._staging.over(incarnation)

    def stop(self) -> None:
        """What is being pushed is given up. Mutates."""
        if self._pusher is not None:
            self._pusher.stop()

    def close(self) -> None:
        """Give everything back. Nobody moves anything any more."""
        if self._pusher is not None:
            self._pusher.close()
        if self._staging is not None:
            self._staging.close()
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # ---- inside

    def _area(self, transport: Transport, size: str, users: int) -> Staging:
        count = parse_bytes(size)
        if count < self._rows.page_bytes:
            raise ConfigError(
                f"connector {self._name}: staging {size} does not hold one page of {self._rows.page_bytes} bytes"
            )
        return Staging(count, self._rows.page_bytes, users, failed_is_final=transport.failed_is_final)

    def _open(self, transport: Transport, *, streams: bool) -> None:
        memory = list(self._rows.regions)
        if any(not region.flags.c_contiguous for region in memory):
            raise ConfigError(f"connector {self._name}: regions of KV memory are not contiguous")
        try:
            self._card = transport.open([*memory, *([self._staging.area] if self._staging is not None else ())])
        except TransportError as error:
            transport.close()
            if not streams:
                raise ConfigError(f"connector {self._name}: {transport.name}: {error}") from error
            log.info("connector %s: pages go over the line: %s: %s", self._name, transport.name, error)
            self._transport = self._staging = None
