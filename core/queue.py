"""The waiting queue: arrival order until somebody orders it, and then that order."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from engine.core.request import Request

WALK_AHEAD = 16


class WaitingQueue:
    """Requests that hold no page and wait to start. The core's; schedulers see it through ``step.queue()``."""

    __slots__ = ("_items", "_key")

    def __init__(self) -> None:
        self._items: list[Request] = []
        self._key: Callable[[Request], Any] | None = None

    def keep_sorted_by(self, key: Callable[[Request], Any] | None) -> None:
        """Every later ``push`` puts a request in its place by ``key`` (``None``: as pushed). Mutates."""
        self._key = key

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)

    def __contains__(self, request: object) -> bool:
        return any(item is request for item in self._items)

    def push(self, request: Request, *, front: bool = False) -> None:
        """Queue a request at the back, or at the front, or where the queue's key says. Mutates."""
        if self._key is not None:
            insort(self._items, request, key=self._key)
        elif front:
            self._items.insert(0, request)
        else:
            self._items.append(request)

    def window(self, size: int) -> tuple[Request, ...]:
        """The first ``size`` requests as they stand now."""
        return tuple(self._items[:size])

    def walk(self, size: int) -> Iterator[Request]:
        """The first ``size`` requests as they stood when the walk began, or nearly: the first few cost no copy of all.

        Requests may leave the queue meanwhile; they may still be yielded.
        """
        first = self._items[:WALK_AHEAD]
        yield from first
        if len(first) == WALK_AHEAD:
            seen = set(first)
            yield from [request for request in self._items[:size] if request not in seen]

    def reorder(self, window: int, ordered: Sequence[Request]) -> None:
        """Put ``ordered`` first; requests of the window that it leaves out keep their order behind it. Mutates."""
        chosen = set(ordered)
        left_out = [request for request in self._items[:window] if request not in chosen]
        self._items[:window] = [*ordered, *left_out]

    def remove(self, gone: Collection[Request]) -> None:
        """Take these out, wherever they stand; those that are not in it are ignored. Mutates."""
        if gone:
            self._items = [request for request in self._items if request not in gone]

    def discard(self, request: Request) -> None:
        """Take one out, wherever it stands; ignored if it is not in it. Mutates."""
        try:
            self._items.remove(request)
        except ValueError:
            return

    def head(self) -> Request | None:
        """The first request, or ``None``."""
        return self._items[0] if self._items else None
