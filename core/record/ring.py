"""The newest lines of a record, in bounded memory."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.core.record.notes import Begin, Finis, Note
from engine.core.record.recorder import Entry

ENTRY_BYTES = 90  # what an entry takes beside its text, about
END_BYTES = 500


class Kept(NamedTuple):
    """What a ring holds at a moment."""

    early: list[Note]  # requests whose coming is no longer in it, and whose end is, or is still to come
    entries: list[Entry]
    dropped: int  # lines that it no longer holds


class Ring:
    """A sink that forgets the oldest.

    Args:
        most: bytes that it may hold, about. Notes of live requests are held in any case.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0
        self.dropped = 0
        self._entries: deque[Entry] = deque()
        self._early: dict[int, Note] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        """The next line. Mutates."""
        self._entries.append(entry)
        self.size += len(entry) + ENTRY_BYTES if isinstance(entry, bytes) else _weight(entry)
        while self.size > self.most and len(self._entries) > 1:
            self._drop()

    def kept(self) -> Kept:
        """What there is now, as copies of lists: to be read by another thread."""
        return Kept(list(self._early.values()), list(self._entries), self.dropped)

    def _drop(self) -> None:
        self.dropped += 1
        entry = self._entries.popleft()
        if isinstance(entry, bytes):
            self.size -= len(entry) + ENTRY_BYTES
        elif isinstance(entry, Begin):
            self._early[entry.note.add.n] = entry.note  # counted until its end goes
        else:
            self.size -= _weight(entry)
            if (note := self._early.pop(entry.note.add.n, None)) is not None:
                self.size -= note.size


def _weight(entry: Begin | Finis) -> int:
    return entry.note.size if isinstance(entry, Begin) else END_BYTES + len(entry.tail)
