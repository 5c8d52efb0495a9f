"""KV memory as what travels: rows of bytes, batch by batch."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from engine.core.memory import KVLayout

BATCH = 1 << 20  # bytes of pages that are sent and checked at once


class Rows:
    """KV memory as rows of bytes, a page's one after the other."""

    def __init__(self, layout: KVLayout) -> None:
        self._regions = layout.regions
        self.page_bytes = layout.page_bytes

    def of(self, pages: Sequence[int]) -> list[memoryview]:
        """The memory of these pages."""
        return [region[page].data for page in pages for region in self._regions]

    def batches(self, count: int) -> Iterator[tuple[int, int]]:
        """(first, end) of the batches in which so many pages travel."""
        size = max(1, BATCH // max(1, self.page_bytes))
        return ((first, min(count, first + size)) for first in range(0, count, size))


def checksum(rows: Sequence[memoryview]) -> int:
    """CRC-32 of the bytes of all rows."""
    value = 0
    for row in rows:
        value = zlib.crc32(row, value)
    return value
