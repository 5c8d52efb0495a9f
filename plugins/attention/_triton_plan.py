"""What backend ``triton`` works out on the host, once a step: slots, page tables, and pieces of work. Numbers only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.batch import Batch

ITEM, MERGE = 8, 4  # numbers of an item and of a merge, as the kernels read them
SPLIT = 128  # keys that a piece has at least
NOBODY = -1  # the token of an item, and the part of one, that is none

Ints = NDArray[np.int32]


class Kind(NamedTuple):
    """What of a layer its plan depends on: type of queries, query heads of a KV head, KV heads, window (0: none)."""

    dtype: str
    group: int
    kv_heads: int
    window: int


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch as arrays, one number a row; ``table`` is where its page table begins in ``pages``.

    ``slots`` says where each token's K and V go: ``page * page_size + offset``.
    """

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    table: NDArray[np.int64]
    pages: Ints
    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries that are worked on together, one number a tile: as ``Rows``, and the keys that they see."""

    token: NDArray[np.int64]
    count: NDArray[np.int64]
    position: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    table: NDArray[np.int64]


class Pieces(NamedTuple):
    """``items [items, ITEM]``, ``merges [tiles in pieces, MERGE]``, and how many parts the merges read."""

    items: Ints
    merges: Ints
    parts: int


def rows_of(batch: Batch) -> Rows:
    """Raises ``ValueError`` where a page table is too short."""
    size = batch.page_size
    starts, counts = np.array(batch.starts, np.int64), np.array(batch.counts, np.int64)
    used = -(-(starts + counts) // size)
    pages = _together(batch.pages, used.tolist(), size)
    table, firsts = _before(used), _before(counts)
    row = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(len(row)) - firsts[row] + starts[row]
    slots = pages[table[row] + position // size].astype(np.int64) * size + position % size
    return Rows(starts, counts, firsts, table, pages, slots)


def tiles_of(rows: Rows, chosen: NDArray[Any], queries: int, window: int, align: int) -> Tiles:
    """Tiles of at most so many queries. Their first key is a multiple of ``align``, at or before the first one seen."""
    counts = rows.counts[chosen]
    each = -(-counts // queries)
    row = np.repeat(np.arange(len(counts)), each)
    done = (np.arange(len(row)) - _before(each)[row]) * queries
    count = np.minimum(counts[row] - done, queries)
    position = rows.starts[chosen][row] + done
    begin = np.maximum(position - window + 1, 0) // align * align if window else np.zeros_like(position)
    return Tiles(
        rows.firsts[chosen][row] + done, count, position, begin, position + count, rows.table[chosen][row]
    )  # fmt: skip


def pieces_of(tiles: Tiles, align: int, wanted: int, fixed: int | None = None) -> Pieces:
    """Cut the keys of tiles so that about ``wanted`` items come out, all of nearly the same size; the longest first.

    There are at most ``wanted`` items more than tiles, and none has more keys than a fair share (or ``SPLIT``).

    Args:
        align: pieces are multiples of so many keys, but for the last of a tile.
        fixed: keys of a piece, whatever the batch.
    """
    work = tiles.end - tiles.begin
    share = fixed or max(SPLIT, -(-int(work.sum()) // wanted))
    share = -(-share // align) * align
    each = np.maximum(-(-work // share), 1)
    tile = np.repeat(np.arange(len(work)), each)
    begin = tiles.begin[tile] + (np.arange(len(tile)) - _before(each)[tile]) * share
    end = np.minimum(begin + share, tiles.end[tile])
    cut = each > 1
    part = np.where(cut[tile], np.cumsum(cut[tile]) - 1, NOBODY)
    items = np.zeros((len(tile), ITEM), np.int32)
    for column, values in enumerate((tiles.token[tile], tiles.count[tile], tiles.position[tile], begin, end,
                                     tiles.table[tile], part)):  # fmt: skip
        items[:, column] = values
    merges = np.zeros((int(cut.sum()), MERGE), np.int32)
    for column, values in enumerate((tiles.token[cut], tiles.count[cut], _before(each[cut]), each[cut])):
        merges[:, column] = values
    return Pieces(items[np.argsort(begin - end, kind="stable")], merges, int(each[cut].sum()))


def padded(records: Ints, rows: int) -> Ints:
    """As many rows as a graph launches: those that are added say that there is nothing to do."""
    result = np.zeros((rows, records.shape[1]), np.int32)
    result[: len(records)] = records
    result[len(records) :, 0] = NOBODY
    return result


def _before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many come before each."""
    return np.cumsum(counts) - counts


def _together(tables: Sequence[Sequence[int]], used: Sequence[int], size: int) -> Ints:
    """The used part of every table, one after the other."""
    together = array("i")  # half the time of a list and numpy
    for row, (table, count) in enumerate(zip(tables, used, strict=True)):
        if len(table) < count:
            raise ValueError(f"row {row} needs {count} pages of {size} and has {len(table)}")
        together.extend(table[:count])
    return np.frombuffer(together, np.int32)
