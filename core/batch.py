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
        shared: pages at the front that all tables have in common and whose KV is there already: they may be read once
            for all rows.
    """

    starts: Sequence[int]
    counts: Sequence[int]
    pages: Sequence[Sequence[int]]
    page_size: int
    device: Any = "cpu"
    shared: int = 0

    @property
    def tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One attention layer of a model.

    Attributes:
        heads: query heads, a multiple of ``kv_heads``.
        kv_heads: heads of K and V.
        k_dim: numbers of a head of queries and K.
        v_dim: numbers of a head of V.
        scale: what scores are multiplied by.
        window: how many keys a query sees at most, itself and those right before it; ``None``: all before it.
        soft_cap: scores become ``soft_cap * tanh(score * scale / soft_cap)``; ``None``: they stay.
        kv_dtype: type of K and V in pages, where it is not that of the queries.
    """

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    kv_dtype: str = ""

    @property
    def needs(self) -> frozenset[str]:
        """Capabilities that a backend must provide for it, besides the kinds of batches."""
        wants = {
            "attention:window": self.window is not None,
            "attention:soft-cap": self.soft_cap is not None,
            "attention:fp8-kv": self.kv_dtype.startswith("float8"),
        }
        return frozenset(name for name, wanted in wants.items() if wanted)
