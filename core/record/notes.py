"""What a recorder keeps of a request, and how that becomes lines: with digests, once it leaves the process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from engine.core.grammar_desk import GRAMMAR
from engine.core.identity import pack
from engine.core.record.lines import Add, End, Line
from engine.core.record.pages import Veil
from engine.core.request import Request, SamplingParams

if TYPE_CHECKING:
    from engine.core.loop import EngineCore

LABELS = frozenset({"tenant", "category", "routing_key"})
"""Metadata whose text stands in a log as it is: policies name these, or sort by them."""
LONGEST_LABEL = 128
PARAMS = ("max_tokens", "min_tokens", "ignore_eos", "temperature", "choice")
USUAL = tuple((name, getattr(SamplingParams(), name)) for name in PARAMS)
NOTE_BYTES = 700  # what a note takes beside the tokens, about


class Note:
    """A request as a recorder remembers it.

    Attributes:
        add: its line, without digests.
        packed: its prompt, four bytes a token.
        parent: what the digests behind the prompt's are chained to, once those are known.
    """

    __slots__ = ("add", "packed", "parent")

    def __init__(self, add: Add, packed: bytes) -> None:
        self.add = add
        self.packed = packed
        self.parent: bytes | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return NOTE_BYTES + len(self.packed)


class Begin(NamedTuple):
    """The place of a request's ``add`` in a log."""

    note: Note

    def line(self, veil: Veil) -> Add:
        """The line, with its digests. Any thread may ask for it; the note remembers where its digests end."""
        note = self.note
        pages, note.parent = veil.pages(note.packed, veil.root)
        return replace(note.add, pages=pages)


class Finis(NamedTuple):
    """The place of a request's ``end`` in a log; ``tail``: its tokens from the prompt's last whole group on."""

    note: Note
    end: End
    tail: bytes

    def line(self, veil: Veil) -> Line:
        """The line, with its digests. Any thread may ask for it; the note remembers where its digests end."""
        note = self.note
        if note.parent is None:
            _, note.parent = veil.pages(note.packed, veil.root)
        pages, _ = veil.pages(self.tail, note.parent)
        return replace(self.end, pages=pages)


class Scribe:
    """Makes notes of requests. Does not mutate them.

    Args:
        veil: hides what is not for a log.
        labels: more keys of metadata whose text stands as it is.
    """

    def __init__(self, veil: Veil, labels: Collection[str] = ()) -> None:
        self._veil = veil
        self._labels = LABELS.union(labels)

    def add(self, request: Request, now: float, deadline: float | None, parked: Collection[str]) -> Note:
        """A note of a request that came."""
        line = Add(
            n=request.arrival_index, id=request.id, t=now, arrival=None if request.arrival == now else request.arrival,
            prompt=request.num_prompt, params=_params(request), priority=request.priority,
            salt=self._veil.word(request.salt), adapter=request.adapter, read=request.read_cache,
            write=request.write_cache, pooling="" if request.pooling is None else request.pooling.kind,
            ttl=request.cache_ttl, deadline=deadline, metadata=self._metadata(request.metadata),
            parked=sorted(parked),
        )  # fmt: skip
        return Note(line, request.packed)

    def before(self, request: Request, now: float) -> Note:
        """A note of a request that was there before the log."""
        deadline = None if request.deadline is None else request.deadline - request.arrival
        note = self.add(request, now, deadline, request.parked_on)
        note.add.before = (request.state.value, request.num_output, request.computed)
        return note

    def end(self, note: Note, request: Request, now: float) -> Finis:
        """The end of a request, or what there is of it by now."""
        first = request.num_prompt - request.num_prompt % self._veil.group
        finish = request.finish.value if request.finish is not None else ""
        line = End(
            note.add.n, now, finish, request.num_output, "", request.started, request.cached_tokens,
            request.preemptions, request.computed,
        )  # fmt: skip
        return Finis(note, line, pack(request.tokens[first:]))

    def _metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._shown(key, value) for key, value in metadata.items()} if metadata else {}

    def _shown(self, key: str, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str) and (is_number(value) or (key in self._labels and len(value) <= LONGEST_LABEL)):
            return value
        return self._veil.word(value if isinstance(value, str) else repr(value))


def is_number(text: str) -> bool:
    """Whether it is a number written out, as HTTP brings them."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _params(request: Request) -> dict[str, Any]:
    params = request.params
    found = {name: value for name, usual in USUAL if (value := getattr(params, name)) != usual}
    if params.grammar is not None:
        found[GRAMMAR] = True
    return found


def labels_of(core: EngineCore) -> set[str]:
    """Keys of metadata that the options of selected policies name."""
    keys = (getattr(policy.options, "key", None) for policy in core.policies)
    return {key for key in keys if isinstance(key, str)}
