"""What backend ``triton`` works out on the host, once a step: pieces of work. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.plugins.attention._rows import Ints, Rows, before

ITEM = 8
"""Numbers of an item: first token, queries, position of the first, first key, end of the keys, page table, part, 0."""

MERGE = 4
"""Numbers of a merge: first token, queries, first part, parts."""

SPLIT = 128  # keys that a piece has at least
NOBODY = -1  # the token of an item, and the part of one, that is none


class Kind(NamedTuple):
    """What of a layer its plan depends on: type of queries, query heads of a KV head, KV heads, window (0: none)."""

    dtype: str
    group: int
    kv_heads: int
    window: int


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


def tiles_of(rows: Rows, chosen: NDArray[Any], queries: int, window: int, align: int) -> Tiles:
    """Tiles of at most so many queries. Their first key is a multiple of ``align``, at or before the first one seen."""
    counts = rows.counts[chosen]
    each = -(-counts // queries)
    row = np.repeat(np.arange(len(counts)), each)
    done = (np.arange(len(row)) - before(each)[row]) * queries
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
    begin = tiles.begin[tile] + (np.arange(len(tile)) - before(each)[tile]) * share
    end = np.minimum(begin + share, tiles.end[tile])
    cut = each > 1
    part = np.where(cut[tile], np.cumsum(cut[tile]) - 1, NOBODY)
    items = np.zeros((len(tile), ITEM), np.int32)
    for column, values in enumerate((tiles.token[tile], tiles.count[tile], tiles.position[tile], begin, end,
                                     tiles.table[tile], part)):  # fmt: skip
        items[:, column] = values
    merges = np.zeros((int(cut.sum()), MERGE), np.int32)
    for column, values in enumerate((tiles.token[cut], tiles.count[cut], before(each[cut]), each[cut])):
        merges[:, column] = values
    return Pieces(items[np.argsort(begin - end, kind="stable")], merges, int(each[cut].sum()))


def padded(records: Ints, rows: int) -> Ints:
    """As many rows as a graph launches: those that are added say that there is nothing to do."""
    result = np.zeros((rows, records.shape[1]), np.int32)
    result[: len(records)] = records
    result[len(records) :, 0] = NOBODY
    return result
