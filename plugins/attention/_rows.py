"""A batch as arrays, worked out on the host once a step. Numbers only: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.core.batch import Batch

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch as arrays, one number a row; ``table`` is where its page table begins in ``pages``."""

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    table: NDArray[np.int64]
    pages: Ints
    size: int  # tokens a page

    def slots(self) -> NDArray[np.int64]:
        """Where each token's K and V go, ``[tokens]``: ``page * size + offset``."""
        row = np.repeat(np.arange(len(self.counts)), self.counts)
        position = np.arange(len(row)) - self.firsts[row] + self.starts[row]
        page = self.pages[self.table[row] + position // self.size].astype(np.int64)
        return page * self.size + position % self.size


def rows_of(batch: Batch) -> Rows:
    """Raises ``ValueError`` where a page table is too short."""
    size = batch.page_size
    starts, counts = np.array(batch.starts, np.int64), np.array(batch.counts, np.int64)
    used = -(-(starts + counts) // size)
    pages = _together(batch.pages, used.tolist(), size)
    return Rows(starts, counts, before(counts), before(used), pages, size)


def before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many come before each."""
    return np.cumsum(counts) - counts


def _together(tables: Sequence[Sequence[int]], used: Sequence[int], size: int) -> Ints:
    """The used part of every table, one after the other."""
    together: list[int] = []
    for row, (table, count) in enumerate(zip(tables, used, strict=True)):
        if len(table) < count:
            raise ValueError(f"row {row} needs {count} pages of {size} and has {len(table)}")
        together += table[:count]
    return np.array(together, np.int32)
