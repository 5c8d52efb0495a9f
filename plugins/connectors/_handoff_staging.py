"""Where a library writes that may write late: memory of its own, cut in slots, never KV memory.

    free ── take ──▶ in use ── all has come, or nothing can ──▶ free
                       │ given up while something may still come
                       ▼
                     in limbo ── known that nothing comes any more ──▶ free

Nothing can come any more when the motion that wrote to it has ended, when the peer that was to write to it has promised
so, or when that peer's process is known to be gone and the transport has forgotten it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.memory import Bytes
from engine.plugins.connectors._handoff_wire import LineError
from engine.plugins.connectors._transport import Motion

ALIGNED = 4096
LARGEST = 4 << 20  # bytes of a slot, unless a page is larger
LOOK = 0.05  # seconds between two looks at what is in limbo, while somebody waits for room

_outlived: list[Bytes] = []  # memory that something may still write to after its connector was closed


class NoRoom(LineError):
    """No slot was free in time. That says nothing of the peer, with whom nothing is open."""

    well = True


@dataclass(frozen=True, slots=True)
class Slot:
    """A part of the area. ``offset``: bytes from the area's beginning; ``memory``: its bytes, one row."""

    offset: int
    memory: Bytes

    @property
    def address(self) -> int:
        """Where it lies."""
        return int(self.memory.ctypes.data)


@dataclass(slots=True)
class Limbo:
    """Why a slot cannot be used.

    Args:
        peer: the incarnation with which bytes were exchanged.
        motion: our own, that was not over; its end ends this.
        number: of what the peer was asked to send; its promise ends this.
    """

    peer: str
    motion: Motion | None = None
    number: int = 0


class Staging:
    """The area and its slots. Any thread may call.

    Args:
        size: bytes of the area; at least ``page_bytes``.
        users: how many slots are wanted at once.
        failed_is_final: whether a motion that failed writes nothing any more.

    Attribute ``area``: its memory, ``[size]``.
    """

    def __init__(self, size: int, page_bytes: int, users: int, *, failed_is_final: bool) -> None:
        whole = np.zeros(size + ALIGNED, np.uint8)
        start = -whole.ctypes.data % ALIGNED
        self.area: Bytes = whole[start : start + size]
        self.slot_bytes = max(page_bytes, min(LARGEST, size // users))
        self._final = failed_is_final
        self._changed = threading.Condition()
        self._free: list[Slot] = []
        self._limbo: dict[int, tuple[Slot, Limbo]] = {}  # by offset
        for offset in range(0, size - self.slot_bytes + 1, self.slot_bytes):
            self._free.append(Slot(offset, self.area[offset : offset + self.slot_bytes]))

    @property
    def address(self) -> int:
        """Where the area lies."""
        return int(self.area.ctypes.data)

    @property
    def in_limbo(self) -> int:
        """Slots that cannot be used."""
        return len(self._limbo)

    def take(self, patience: float, cancelled: Callable[[], bool]) -> Slot:
        """A free slot, waited for if need be. Mutates. Raises ``NoRoom`` where there is none in time."""
        until = time.monotonic() + patience
        with self._changed:
            while True:
                self.look()
                if self._free:
                    return self._free.pop()
                left = until - time.monotonic()
                if cancelled() or left <= 0:
                    raise NoRoom(
                        f"there is no room in the staging area ({len(self._limbo)} of its slots may still be "
                        "written to)"
                    )
                self._changed.wait(min(left, LOOK))

    def give(self, slot: Slot) -> None:
        """Nothing writes to it any more. Mutates."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def strand(self, slot: Slot, limbo: Limbo) -> None:
        """Something may still write to it. Mutates."""
        with self._changed:
            self._limbo[slot.offset] = slot, limbo

    def promised(self, peer: str) -> list[int]:
        """What this peer was asked to send, and has not said the end of. Does not mutate."""
        with self._changed:
            return [limbo.number for _, limbo in self._limbo.values() if limbo.peer == peer and limbo.number]

    def over(self, peer: str, numbers: Sequence[int] | None = None) -> None:
        """Nothing comes any more of these numbers; ``None``: of anything from this peer, which is gone. Mutates."""
        with self._changed:
            self._reclaim(lambda limbo: limbo.peer == peer and (numbers is None or limbo.number in numbers))

    def look(self) -> None:
        """See which motions have ended meanwhile. Mutates."""
        with self._changed:
            self._reclaim(lambda limbo: limbo.motion is not None and settled(limbo.motion, final=self._final))

    def close(self) -> None:
        """The connector ends. Memory that something may still write to stays where it is for the process's life."""
        with self._changed:
            self.look()
            for _, limbo in self._limbo.values():
                if limbo.motion is not None:
                    limbo.motion.drop()
            if self._limbo:
                _outlived.append(self.area)

    # ---- inside

    def _reclaim(self, over: Callable[[Limbo], bool]) -> None:
        for offset, (slot, limbo) in list(self._limbo.items()):
            if over(limbo):
                if limbo.motion is not None:
                    limbo.motion.drop()
                del self._limbo[offset]
                self._free.append(slot)
        if self._free:
            self._changed.notify_all()


def settled(motion: Motion, *, final: bool) -> bool:
    """Whether the motion writes nothing any more, as far as is known now.

    Args:
        final: one that failed writes nothing any more.
    """
    state = motion.state()
    return state == "done" or (state == "failed" and final)
