"""Transfers under way: what was asked of the connectors, and which pages are fenced until they answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from engine.core.errors import EngineError
from engine.core.pages import PagePool
from engine.core.plan import Transfer, TransferEvent
from engine.core.request import Request

HINT = "kv_"  # how names in a request's metadata begin that are for connectors


class TransferBook:
    """Open transfers by id. Pages of an open transfer stay fenced; every transfer ends exactly once."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._open: dict[str, Transfer] = {}
        self._wishes: list[tuple[int, Transfer]] = []  # and the number of the step that must have landed before

    def __len__(self) -> int:
        return len(self._open)

    @property
    def unsaid(self) -> int:
        """Cancels that the connectors have not been told of yet."""
        return sum(wish.kind == "cancel" for _, wish in self._wishes)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def ask(self, wish: Transfer, after: int = 0) -> None:
        """Open a transfer and fence its pages. Mutates. Raises ``EngineError`` where the id is open already.

        Args:
            after: tell the connectors once this step has landed: until then it may write to the pages.
        """
        if wish.id in self._open:
            raise EngineError(f"transfer {wish.id!r} is open already")
        self._pool.fence(wish.pages)
        self._open[wish.id] = wish
        self._wishes.append((after, wish))

    def cancel(self, name: str) -> bool:
        """Tell the connectors that nobody waits for it any more; it stays open until they end it. Mutates.

        True where they have not been told of it yet: then it has ended here.
        """
        for place, (_, wish) in enumerate(self._wishes):
            if wish.id == name:
                del self._wishes[place]
                self._pool.unfence(self._open.pop(name).pages)
                return True
        wish = self._open[name]
        self._wishes.append((0, Transfer(f"cancel {name}", "cancel", wish.request_id, to=wish.to, of=name)))
        return False

    def decline(self, name: str, request_id: str, to: str) -> None:
        """What the ended probe ``name`` has found is not wanted: say so to whoever holds it. Mutates."""
        self._wishes.append((0, Transfer(f"cancel {name}", "cancel", request_id, to=to, of=name)))

    def take_wishes(self, landed: int) -> list[Transfer]:
        """What was asked for since the last call, as far as it may begin when all steps up to ``landed`` have landed.

        Mutates.
        """
        wishes = [wish for after, wish in self._wishes if after <= landed]
        self._wishes = [(after, wish) for after, wish in self._wishes if after > landed]
        return wishes

    def told(self, names: Collection[str]) -> list[Transfer]:
        """Open transfers that only connectors of these names were asked for. Does not mutate."""
        return [wish for wish in self._open.values() if wish.to in names]

    def abandon(self, wishes: Iterable[Transfer] | None) -> list[Transfer]:
        """Nobody will answer for these (``None``: all that are open): they end, and their pages stay fenced. Mutates.

        Whether something still reads or writes the pages is not known, so they are lost until the engine ends.
        """
        names = list(self._open) if wishes is None else [wish.id for wish in wishes]
        return [self._open.pop(name) for name in names if name in self._open]

    def settle(self, events: Iterable[TransferEvent]) -> tuple[list[tuple[Transfer, TransferEvent]], int]:
        """Close what the events end and lift the fences. Mutates.

        Returns the transfers that ended, each with the event that ended it, and how many events named none that is open
        (late, repeated, unknown).
        """
        ended: list[tuple[Transfer, TransferEvent]] = []
        stray = 0
        for event in events:
            wish = self._open.pop(event.transfer_id, None)
            if wish is None:
                stray += 1
                continue
            self._pool.unfence(wish.pages)
            ended.append((wish, event))
        return ended, stray


def hints_of(request: Request) -> dict[str, Any]:
    """What the request's metadata says to connectors."""
    return {name: value for name, value in request.metadata.items() if str(name).startswith(HINT)}
