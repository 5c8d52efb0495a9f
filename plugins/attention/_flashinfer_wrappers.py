"""FlashInfer's wrappers, each planned and run in the same way; every default that would be wrong is said here.

Whoever plans by FlashInfer's defaults has no causal mask and float16. Page tables go in as they lie on the host, since
its planner works there, but for the pages themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

LAYOUT = "NHD"  # a page is [page_size, kv_heads, head_dim]
CORES_GROUP = 4  # query heads to a KV head from which a decode fills the rows of a matrix product
PLAIN_GROUPS = frozenset({1, 2, 3, 4, 6, 8, 16})  # that decode kernels without tensor cores are built for


class Layer(NamedTuple):
    """What layers must have in common to be planned together. ``window`` counts the query's own position."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    window: int | None = None
    soft_cap: float | None = None


class OnDevice(NamedTuple):
    """Tables as torch's: offsets and lengths on the host, where FlashInfer plans; the pages where they are read."""

    queries: Tensor
    offsets: Tensor
    pages: Tensor
    last: Tensor
    lengths: Tensor


class Wrapper(Protocol):
    """A kernel and its plan, for layers of one kind."""

    def plan(self, tables: Sequence[OnDevice], size: int) -> None:
        """Take over rows. Reads the tables, and copies what it needs of them to the device."""

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor], out: Tensor | None) -> Tensor:
        """Answer ``query [tokens, heads, head_dim]`` into ``out``, or into new memory."""


class Graph(NamedTuple):
    """Memory that a captured graph reads page tables from: offsets ``[rows + 1]``, pages, last ``[rows]``; int32."""

    offsets: Tensor
    pages: Tensor
    last: Tensor


def uses_tensor_cores(layer: Layer, wanted: str) -> bool:
    """Whether decodes of this layer are computed on tensor cores."""
    group = layer.heads // layer.kv_heads
    if group not in PLAIN_GROUPS or wanted != "auto":
        return group not in PLAIN_GROUPS or wanted == "always"
    return group >= CORES_GROUP or layer.kv_dtype.itemsize == 1


def _types(layer: Layer) -> dict[str, Any]:
    """What every plan is told beside the sizes."""
    return {
        "sm_scale": layer.scale,
        "logits_soft_cap": layer.soft_cap,
        "q_data_type": layer.dtype,
        "kv_data_type": layer.kv_dtype,
    }


def _window(layer: Layer) -> int:
    """FlashInfer counts the positions to the left of the query; -1: all of them."""
    return -1 if layer.window is None else layer.window - 1


class Decode:
    """One query a row. ``graph``: where a captured graph of so many rows finds its page tables."""

    def __init__(self, library: Any, workspace: Tensor, layer: Layer, cores: bool, graph: Graph | None = None) -> None:
        buffers: dict[str, Any] = {}
        if graph is not None:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": graph.offsets,
                "paged_kv_indices_buffer": graph.pages,
                "paged_kv_last_page_len_buffer": graph.last,
            }
        self._layer = layer
        self._wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, LAYOUT, use_tensor_cores=cores, **buffers)

    def plan(self, tables: Sequence[OnDevice], size: int) -> None:
        (rows,), layer = tables, self._layer
        self._wrapper.plan(
            *(rows.offsets, rows.pages, rows.last, layer.heads, layer.kv_heads, layer.dim, size),
            window_left=_window(layer),
            **_types(layer),
        )

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor], out: Tensor | None) -> Tensor:
        answer: Tensor = self._wrapper.run(query, pages, out=out)
        return answer


class Prefill:
    """Any number of queries a row: the last of the row's tokens, each of which sees those up to itself."""

    def __init__(self, library: Any, workspace: Tensor, layer: Layer) -> None:
        self._layer = layer
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT)

    def plan(self, tables: Sequence[OnDevice], size: int) -> None:
        (rows,), layer = tables, self._layer
        self._wrapper.plan(
            *(rows.queries, rows.offsets, rows.pages, rows.last, layer.heads, layer.kv_heads, layer.dim, size),
            causal=True,
            window_left=_window(layer),
            **_types(layer),
        )

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor], out: Tensor | None) -> Tensor:
        answer: Tensor = self._wrapper.run(query, pages, out=out)
        return answer


class Holistic:
    """Prefills and decodes in one kernel. It knows no window, takes lengths, and is told a cap in each run."""

    def __init__(self, library: Any, device: torch.device, layer: Layer) -> None:
        self._layer = layer
        self._wrapper = library.BatchAttention(LAYOUT, device=str(device))

    def plan(self, tables: Sequence[OnDevice], size: int) -> None:
        (rows,), layer = tables, self._layer
        self._wrapper.plan(
            *(rows.queries, rows.offsets, rows.pages, rows.lengths, layer.heads, layer.kv_heads, layer.dim, layer.dim),
            size,
            causal=True,
            **_types(layer),
        )

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor], out: Tensor | None) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
        answer: Tensor = self._wrapper.run(query, pages, out=out, logits_soft_cap=self._layer.soft_cap or 0.0)[0]
        return answer


class Cascade:
    """Decodes that share prefixes: what is shared is read once for each group of rows, then both answers are merged.

    It knows no window: one would begin in what is shared, at another place for each row.
    """

    def __init__(self, library: Any, workspace: Tensor, layer: Layer) -> None:
        self._layer = layer
        self._wrapper = library.MultiLevelCascadeAttentionWrapper(2, workspace, LAYOUT)

    def plan(self, tables: Sequence[OnDevice], size: int) -> None:
        layer = self._layer
        self._wrapper.plan(
            *([getattr(level, name) for level in tables] for name in ("queries", "offsets", "pages", "last")),
            *(layer.heads, layer.kv_heads, layer.dim, size),
            causal=True,
            **_types(layer),
        )

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor], out: Tensor | None) -> Tensor:
        answer: Tensor = self._wrapper.run(query, pages)
        return answer if out is None else out.copy_(answer)
