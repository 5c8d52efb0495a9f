"""Backend ``flashinfer`` on its stand-in, and batches whose answers are known."""

from __future__ import annotations

from typing import Any

import flashinfer_standin as library
import torch

from engine.plugins.attention.flashinfer import FlashInferAttention
from engine.testing.paged import PagedMemory, Row, Shape, dense

SMALL = {"workspace": "32MiB"}
ROWS = [(40, 1), (0, 9), (33, 1), (36, 1), (50, 7), (9, 1), (40, 1)]
SHARING = {"cascade": 16, "cascade_rows": 3}


def on(given: Any) -> type[FlashInferAttention]:
    """The backend, with this for FlashInfer."""

    class On(FlashInferAttention):
        """FlashInfer, or what stands in for it."""

        def _library(self) -> Any:
            return given

    return On


OnStandIn = on(library)


def memory(
    rows: list[tuple[int, int]],
    shared: int = 0,
    *,
    dtype: str = "bfloat16",
    heads: int = 8,
    size: int = 4,
    seed: int = 0,
) -> PagedMemory:
    """Rows whose first ``shared`` tokens (whole pages) are the same pages."""
    made = PagedMemory(
        Shape(heads=heads, kv_heads=2, head_dim=64, page_size=size, dtype=dtype), [Row(*row) for row in rows], seed=seed
    )
    sharing = [row for row, (start, _) in enumerate(rows) if start >= shared]
    for row in sharing[1:]:
        made.tables[row][: shared // size] = made.tables[sharing[0]][: shared // size]
        for side in (made.row_keys, made.row_values):
            side[row][:shared] = side[sharing[0]][:shared]
    made.fill()
    return made


def expected(given: PagedMemory, scale: float, window: int | None, soft_cap: float | None) -> torch.Tensor:
    """By the definition, in float64."""
    answers, first = [], 0
    for keys, values, (start, count) in zip(given.row_keys, given.row_values, given.rows, strict=True):
        query = given.query[first : first + count]
        answers.append(dense(query, keys, values, start, scale, window=window, soft_cap=soft_cap))
        first += count
    return torch.cat(answers)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, atol=2e-2, rtol=2e-2)
