"""KV memory as what travels: rows of bytes, in pieces and batches."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.core.memory import Bytes, KVLayout
from engine.plugins.connectors._transport import Words

BATCH = 1 << 20  # bytes of pages that are sent and checked at once

Region = tuple[int, int, int]
"""Address, bytes a row, rows: a region of KV memory, here or at a peer."""
Pages = NDArray[np.int64]


class Rows:
    """KV memory as rows of bytes, a page's one after the other."""

    def __init__(self, layout: KVLayout) -> None:
        self.regions = layout.regions
        self.page_bytes = layout.page_bytes

    def of(self, pages: Sequence[int]) -> list[memoryview]:
        """The memory of these pages."""
        return [region[page].data for page in pages for region in self.regions]

    def batches(self, count: int, size: int = BATCH) -> Iterator[tuple[int, int]]:
        """(first, end) of the batches of at most ``size`` bytes in which so many pages travel."""
        each = max(1, size // max(1, self.page_bytes))
        return ((first, min(count, first + each)) for first in range(0, count, each))

    def places(self) -> tuple[Region, ...]:
        """Where the regions lie."""
        return tuple((int(one.ctypes.data), one.shape[1], one.shape[0]) for one in self.regions)

    def unstage(self, memory: Bytes, pages: Sequence[int]) -> None:
        """Copy pages from where they lie region by region (``staged``). Mutates KV memory.

        Raises ``IndexError`` for pages that do not exist.
        """
        at = 0
        for region in self.regions:
            end = at + len(pages) * region.shape[1]
            for page, row in zip(pages, memory[at:end].reshape(len(pages), -1), strict=True):
                region[page] = row  # one copy a row is faster than all at once by their numbers
            at = end

    def checksum(self, pages: Sequence[int]) -> int:
        """CRC-32 of these pages, region by region (``staged``)."""
        return checksum(region[page].data for region in self.regions for page in pages)


def checksum(rows: Iterable[memoryview]) -> int:
    """CRC-32 of the bytes of all rows."""
    value = 0
    for row in rows:
        value = zlib.crc32(row, value)
    return value


def scattered(regions: Sequence[Region], pages: Sequence[int]) -> tuple[Words, Words]:
    """Addresses and lengths of the rows of pages, region by region. Raises ``IndexError`` where there are none such."""
    where = np.asarray(pages, np.int64)
    if len(where) and not 0 <= where.min() <= where.max() < min(rows for _, _, rows in regions):
        raise IndexError(f"pages {where.min()} to {where.max()} of {min(rows for _, _, rows in regions)}")
    starts = [np.uint64(base) + where.astype(np.uint64) * np.uint64(size) for base, size, _ in regions]
    return np.concatenate(starts), np.repeat(np.array([size for _, size, _ in regions], np.uint64), len(where))


def staged(regions: Sequence[Region], count: int, address: int) -> Words:
    """Addresses of the rows of so many pages where they lie one after the other, region by region."""
    sizes: Words = np.repeat(np.array([size for _, size, _ in regions], np.uint64), count)
    starts: Words = np.cumsum(sizes, dtype=np.uint64) - sizes + np.uint64(address)
    return starts


def merged(ours: Words, theirs: Words, lengths: Words) -> tuple[Words, Words, Words]:
    """The same pieces, those that are neighbours on both sides in one."""
    if not len(lengths):
        return ours, theirs, lengths
    apart = (ours[1:] != ours[:-1] + lengths[:-1]) | (theirs[1:] != theirs[:-1] + lengths[:-1])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return ours[first], theirs[first], np.add.reduceat(lengths, first)


def portions(pieces: tuple[Words, Words, Words], most: int) -> Iterator[tuple[Words, Words, Words]]:
    """The pieces, so many at once."""
    ours, theirs, lengths = pieces
    for at in range(0, len(lengths), most):
        yield ours[at : at + most], theirs[at : at + most], lengths[at : at + most]
