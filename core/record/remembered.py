"""A request's part of what a ring holds: found among its lines, in a thread that is not the engine's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.core.record.lines import AnyLine, decode
from engine.core.record.notes import Begin, Finis, Note
from engine.core.record.reading import spelled_out
from engine.core.record.recorder import Entry
from engine.core.record.ring import Kept
from engine.core.record.story import Beginning, Part, Player, emptied

EMPTIED = (b'{"e":"flush"', b'{"e":"weights"')


def remembered(kept: Kept, ends: Sequence[Finis], request: str, config: Mapping[str, Any], group: int) -> Part | None:
    """What is remembered of a request; ``None``: nothing.

    Args:
        ends: what there is of those that have not ended.
        config, group: of the log's header.
    """
    notes = {note.add.n: note for note in kept.early}
    notes |= {entry.note.add.n: entry.note for entry in kept.entries if isinstance(entry, Begin)}
    number = next((n for n, note in notes.items() if note.add.id == request), None)
    if number is None:
        return None
    last = {entry.note.add.n: entry for entry in (*kept.entries, *ends) if isinstance(entry, Finis)}
    players = {
        n: Player(note.add, last[n].end if n in last else None, _beginning(note, last.get(n), group))
        for n, note in notes.items()
        if n <= number
    }
    flushes = [decode(entry) for entry in kept.entries if isinstance(entry, bytes) and entry.startswith(EMPTIED)]
    return Part(
        players.pop(number), list(_between(kept.entries, notes[number])), list(players.values()), emptied(flushes),
        config, any(note is notes[number] for note in kept.early) or notes[number].add.before is not None,
    )  # fmt: skip


def _beginning(note: Note, end: Finis | None, group: int) -> Beginning:
    def beginning(tokens: int) -> bytes | None:
        packed = note.packed
        if end is not None and 4 * tokens > len(packed):
            packed = packed[: 4 * (note.add.prompt - note.add.prompt % group)] + end.tail
        return packed[: 4 * tokens] if 4 * tokens <= len(packed) else None

    return beginning


def _between(entries: Sequence[Entry], note: Note) -> Iterator[AnyLine]:
    """Lines from a request's coming to its end, spelled out; what came before tells what plans leave out."""
    first = next((at for at, entry in enumerate(entries) if isinstance(entry, Begin) and entry.note is note), 0)
    last = next(
        (at for at, entry in enumerate(entries) if isinstance(entry, Finis) and entry.note is note), len(entries)
    )
    base = next((entry for entry in reversed(entries[:first]) if _is_whole_plan(entry)), None)
    wanted = [
        entry for entry in ([] if base is None else [base]) + list(entries[first:last]) if isinstance(entry, bytes)
    ]
    told = spelled_out(map(decode, wanted))
    if base is not None:
        next(told)
    yield from told


def _is_whole_plan(entry: Entry) -> bool:
    return isinstance(entry, bytes) and entry.startswith(b'{"e":"plan"') and b'"rows":' in entry
