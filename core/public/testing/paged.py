"""One layer's KV memory on the bench, and what attention over it must answer: computed densely, in float64.

Whatever no row owns is poison (NaN), so that a single stray read shows in the answer. Imports torch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.core.batch import Batch
from engine.core.protocols import Attention

SPARE_PAGES = 5  # that belong to nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and types of a layer. ``heads`` is a multiple of ``kv_heads``; ``kv_dtype`` is the type of pages, where it
    is not ``dtype``; ``window`` and ``soft_cap`` are what ``Attention.attend`` is told."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    dtype: str = "float32"
    device: str = "cpu"
    kv_dtype: str = ""
    window: int | None = None
    soft_cap: float | None = None

    def __str__(self) -> str:
        more = {"window": self.window, "cap": self.soft_cap, "kv-": self.kv_dtype or None}
        words = [f"{name}{value}" for name, value in more.items() if value is not None]
        plain = f"heads{self.heads}:{self.kv_heads}-dim{self.head_dim}-page{self.page_size}-{self.dtype}"
        return "-".join([plain, *words])

    @property
    def features(self) -> dict[str, Any]:
        """What ``attend`` is told besides."""
        both = {"window": self.window, "soft_cap": self.soft_cap}
        return {name: value for name, value in both.items() if value is not None}


class Row(NamedTuple):
    """A row of a batch: ``start`` tokens have KV, ``tokens`` more are computed."""

    start: int
    tokens: int


class PagedMemory:
    """Rows of random K and V in pages of their own; ``batch``, ``query``, ``keys`` and ``values`` are a step's.

    Attributes:
        tables: page table of each row; may be changed before ``run``.
        k_pages, v_pages: ``[num_pages, page_size, kv_heads, head_dim]``, with the KV that earlier steps have written.
        row_keys, row_values: the K and V of each row, ``[start + count, kv_heads, head_dim]``.
    """

    def __init__(
        self, shape: Shape, rows: Sequence[Row], *, seed: int = 0, shuffled: bool = True, poison: float = math.nan,
        spare_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.shape, self.rows, self._poison = shape, list(rows), poison
        self._random = torch.Generator().manual_seed(seed)
        needs = [-(-(start + count + spare_tokens) // shape.page_size) for start, count in rows]
        pages = sum(needs) + SPARE_PAGES
        order = torch.randperm(pages, generator=self._random).tolist() if shuffled else list(range(pages))
        self.tables = [[order.pop(0) for _ in range(need)] for need in needs]
        inner = (shape.kv_heads, shape.head_dim)
        self.row_keys = [self._stored(self._randn(start + count, *inner)) for start, count in rows]
        self.row_values = [self._stored(self._randn(start + count, *inner)) for start, count in rows]
        self.query = self._randn(sum(count for _, count in rows), shape.heads, shape.head_dim)
        size = (pages, shape.page_size, *inner)
        self.k_pages, self.v_pages = (torch.full(size, poison, **self._kind()).to(self._kv_type()) for _ in range(2))
        self.fill()

    def fill(self) -> None:
        """Poison everything, then write what earlier steps have computed."""
        for pages, rows in ((self.k_pages, self.row_keys), (self.v_pages, self.row_values)):
            pages.fill_(self._poison)
            for table, (start, _), content in zip(self.tables, self.rows, rows, strict=True):
                for at in range(0, start, self.shape.page_size):
                    upto = min(start, at + self.shape.page_size)
                    pages[table[at // self.shape.page_size], : upto - at] = content[at:upto]

    @property
    def batch(self) -> Batch:
        """What the backend is told."""
        return Batch(
            starts=[start for start, _ in self.rows], counts=[count for _, count in self.rows],
            pages=[list(table) for table in self.tables], page_size=self.shape.page_size, device=self.shape.device,
        )  # fmt: skip

    @property
    def keys(self) -> Any:
        """K of the tokens that are computed, row after row."""
        return torch.cat([side[start:] for side, (start, _) in zip(self.row_keys, self.rows, strict=True)])

    @property
    def values(self) -> Any:
        """V of the tokens that are computed, row after row."""
        return torch.cat([side[start:] for side, (start, _) in zip(self.row_values, self.rows, strict=True)])

    def run(self, backend: Attention, scale: float) -> Any:
        """One layer of one step."""
        backend.plan_batch(self.batch)
        return self.layer(backend, scale)

    def layer(self, backend: Attention, scale: float) -> Any:
        """Write and attend, as planned. Memory that the backend allocates is poisoned, too."""
        with poisoned_memory():
            backend.write(self.keys, self.values, self.k_pages, self.v_pages)
            return backend.attend(self.query, self.k_pages, self.v_pages, scale, **self.shape.features)

    def expected(self, scale: float) -> Any:
        """The answer, by the definition, in float64."""
        answers, first = [], 0
        for keys, values, (start, count) in zip(self.row_keys, self.row_values, self.rows, strict=True):
            query = self.query[first : first + count]
            answers.append(dense(query, keys, values, start, scale, **self.shape.features))
            first += count
        return torch.cat(answers)

    def slots(self, row: int, first: int, last: int) -> list[tuple[int, int]]:
        """(page, offset) of a row's positions."""
        size, table = self.shape.page_size, self.tables[row]
        return [(table[at // size], at % size) for at in range(first, last)]

    def owner(self, token: int) -> tuple[int, int]:
        """(row, position) of a token of the flattened batch."""
        for row, (start, count) in enumerate(self.rows):
            if token < count:
                return row, start + token
            token -= count
        raise IndexError(token)

    def _kv_type(self) -> Any:
        return getattr(torch, self.shape.kv_dtype or self.shape.dtype)

    def _stored(self, content: Any) -> Any:
        """What pages can hold of it."""
        return content.to(self._kv_type()).to(content.dtype)

    def _kind(self) -> dict[str, Any]:
        return {"dtype": getattr(torch, self.shape.dtype), "device": self.shape.device}

    def _randn(self, *size: int) -> Any:
        return torch.randn(*size, generator=self._random).to(**self._kind())


def dense(
    query: Any, keys: Any, values: Any, start: int, scale: float, *, window: int | None = None,
    soft_cap: float | None = None,
) -> Any:  # fmt: skip
    """Causal attention of one row whose first query stands at position ``start``; the rest as ``Attention.attend``."""
    share = query.shape[1] // keys.shape[1]
    k, v = (side.double().repeat_interleave(share, dim=1) for side in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) * scale
    if soft_cap is not None:
        scores = (scores / soft_cap).tanh() * soft_cap
    places = torch.arange(keys.shape[0], device=keys.device)
    last = start + places[: query.shape[0], None]
    allowed = places[None] <= last
    if window is not None:
        allowed &= places[None] > last - window
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, memory that torch allocates uninitialised holds NaN: what a backend forgets to write is seen.

    That is a part of torch's deterministic mode; its warnings about other operations are not ours.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
