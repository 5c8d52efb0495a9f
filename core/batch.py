"""What an attention backend is told of a step: plain numbers and page tables, the same for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one step, flattened row after row into ``sum(counts)`` tokens.

    Row i computes ``counts[i]`` tokens at positions ``starts[i] … starts[i] + counts[i] - 1`` and attends, causally, to
    all positions of its own from 0. Position p of row i lives in page ``pages[i][p // page_size]`` at offset
    ``p % page_size``. Rows may share pages; the K and V of all rows are written before any row attends, so a row may
    read what another row of the same step computes.

    Attributes:
        starts: tokens with KV already, per row.
        counts: tokens to compute, per row, at least 1.
        pages: page table per row; may be longer than the row needs, must not be changed.
        page_size: tokens a page.
        device: where index tensors must live (a torch device).
    """

    starts: Sequence[int]
    counts: Sequence[int]
    pages: Sequence[Sequence[int]]
    page_size: int
    device: Any = "cpu"

    @property
    def tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(self.counts)
