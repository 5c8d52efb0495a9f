"""Transfers under way: what was asked of the connectors, and which pages are fenced until they answer."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.errors import EngineError
from engine.core.pages import PagePool
from engine.core.plan import Transfer, TransferEvent


class TransferBook:
    """Open transfers by id. Pages of an open transfer stay fenced; every transfer ends exactly once."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._open: dict[str, Transfer] = {}
        self._wishes: list[Transfer] = []

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, wish: Transfer) -> None:
        """Open a transfer and fence its pages. Mutates. Raises ``EngineError`` where the id is open already."""
        if wish.id in self._open:
            raise EngineError(f"transfer {wish.id!r} is open already")
        self._pool.fence(wish.pages)
        self._open[wish.id] = wish
        self._wishes.append(wish)

    def take_wishes(self) -> list[Transfer]:
        """What was asked for since the last call. Mutates."""
        wishes, self._wishes = self._wishes, []
        return wishes

    def abandon(self, wishes: Iterable[Transfer] | None) -> list[Transfer]:
        """Nobody will answer for these (``None``: all that are open): they end, and their pages stay fenced. Mutates.

        Whether something still reads or writes the pages is not known, so they are lost until the engine ends.
        """
        names = list(self._open) if wishes is None else [wish.id for wish in wishes]
        return [self._open.pop(name) for name in names if name in self._open]

    def settle(self, events: Iterable[TransferEvent]) -> tuple[list[Transfer], int]:
        """Close what the events end and lift the fences. Mutates.

        Returns the transfers that ended, and how many events named none that is open (late, repeated, unknown).
        """
        ended: list[Transfer] = []
        stray = 0
        for event in events:
            wish = self._open.pop(event.transfer_id, None)
            if wish is None:
                stray += 1
                continue
            self._pool.unfence(wish.pages)
            ended.append(wish)
        return ended, stray
