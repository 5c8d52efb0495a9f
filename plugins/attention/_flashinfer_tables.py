"""What FlashInfer is told of a step: which rows are computed together, and their page tables in compressed form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.batch import Batch
from engine.plugins.attention._rows import rows_of

Kind = Literal["decode", "prefill", "batch", "cascade"]
Mixed = Literal["split", "prefill", "batch"]


class Tables(NamedTuple):
    """Rows as FlashInfer wants them: offsets that begin with 0, and what lies between them. All int32.

    Attributes:
        queries: offsets of each row's queries, ``[rows + 1]``.
        offsets: offsets of each row's pages, ``[rows + 1]``.
        pages: the used part of every page table, one after the other, ``[offsets[-1]]``.
        last: tokens in each row's last page, from 1 to the size of a page, ``[rows]``.
        lengths: tokens of each row, ``[rows]``.
    """

    queries: NDArray[np.int32]
    offsets: NDArray[np.int32]
    pages: NDArray[np.int32]
    last: NDArray[np.int32]
    lengths: NDArray[np.int32]


class Part(NamedTuple):
    """Rows that one wrapper computes: ``tokens`` of the flattened batch (a slice, or their numbers) in this order.

    A cascade has two tables: what groups of rows share, and what is each row's own.
    """

    kind: Kind
    tokens: slice | NDArray[np.int64]
    tables: tuple[Tables, ...]


class Sharing(NamedTuple):
    """From which prefix on decodes are put together: tokens of it, rows that have it."""

    tokens: int
    rows: int


class Step:
    """A batch, and its rows in parts. Raises ``ValueError`` where a page table is too short."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.size = batch.page_size
        self._rows = rows_of(batch)
        self._firsts = [0, *accumulate(batch.counts)]
        self._lengths = [start + count for start, count in zip(batch.starts, batch.counts, strict=True)]

    def slots(self) -> NDArray[np.int64]:
        """Where each token of the step is written: page * page_size + offset, ``[tokens]``."""
        return self._rows.slots()

    def parts(self, mixed: Mixed, sharing: Sharing | None) -> list[Part]:
        """Who computes what.

        Args:
            mixed: how decodes and prefills of one step are computed.
            sharing: whether decodes that share a prefix are put together, and from where on; ``None``: never.
        """
        decodes = [row for row, count in enumerate(self.batch.counts) if count == 1]
        prefills = [row for row, count in enumerate(self.batch.counts) if count != 1]
        if decodes and prefills and mixed != "split":
            return [self._part(mixed, range(len(self.batch.counts)))]
        parts = [self._part("prefill", prefills)] if prefills else []
        groups = self.groups(decodes, sharing) if sharing is not None else []
        together = [row for rows, _ in groups for row in rows]
        if groups:
            parts.append(self._cascade(together, groups))
        if rest := sorted(set(decodes) - set(together)):
            parts.append(self._part("decode", rest))
        return parts

    def groups(self, rows: Iterable[int], sharing: Sharing) -> list[tuple[list[int], int]]:
        """Decodes that share pages at the front, and how many pages: computed ones, so that each row has one more."""
        first: dict[int, list[int]] = {}
        for row in rows:
            first.setdefault(self.batch.pages[row][0], []).append(row)
        found = []
        for members in first.values():
            if len(members) >= sharing.rows:
                limit = min(self.batch.starts[row] for row in members) // self.size
                shared = _common([self.batch.pages[row] for row in members], limit)
                if shared and shared * self.size >= sharing.tokens:
                    found.append((members, shared))
        return found

    def tables(self, rows: Sequence[int], skipped: Sequence[int] | None = None) -> Tables:
        """Rows with all their pages, or without so many of the first."""
        skips = skipped or [0] * len(rows)
        lengths = [self._lengths[row] - skip * self.size for row, skip in zip(rows, skips, strict=True)]
        used = [
            self.batch.pages[row][skip : skip - (-length // self.size)]
            for row, skip, length in zip(rows, skips, lengths, strict=True)
        ]
        return _tables([self.batch.counts[row] for row in rows], used, lengths, self.size)

    def _part(self, kind: Kind, rows: Sequence[int]) -> Part:
        return Part(kind, self._tokens(rows), (self.tables(rows),))

    def _cascade(self, rows: list[int], groups: Sequence[tuple[list[int], int]]) -> Part:
        shared = [self.batch.pages[members[0]][:pages] for members, pages in groups]
        common = _tables(
            [len(members) for members, _ in groups], shared, [len(p) * self.size for p in shared], self.size
        )
        own = self.tables(rows, [pages for members, pages in groups for _ in members])
        return Part("cascade", self._tokens(rows), (common, own))

    def _tokens(self, rows: Sequence[int]) -> slice | NDArray[np.int64]:
        if list(rows) == list(range(rows[0], rows[0] + len(rows))):
            return slice(self._firsts[rows[0]], self._firsts[rows[-1] + 1])
        spans = [np.arange(self._firsts[row], self._firsts[row + 1], dtype=np.int64) for row in rows]
        return np.concatenate(spans)


def _tables(counts: Sequence[int], pages: Sequence[Sequence[int]], lengths: Sequence[int], size: int) -> Tables:
    return Tables(
        queries=np.array([0, *accumulate(counts)], np.int32),
        offsets=np.array([0, *accumulate(map(len, pages))], np.int32),
        pages=np.array([page for table in pages for page in table], np.int32),
        last=np.array([(length - 1) % size + 1 for length in lengths], np.int32),
        lengths=np.array(lengths, np.int32),
    )


def _common(tables: Sequence[Sequence[int]], limit: int) -> int:
    """Entries at the front that all share, at most so many."""
    fronts = [tuple(table[:limit]) for table in tables]
    first, last = min(fronts), max(fronts)  # what these two share, all others share
    return next((at for at in range(limit) if first[at] != last[at]), limit)
