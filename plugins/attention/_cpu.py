"""The computing part of backend ``cpu``: page tables as arrays that grow, and calls of the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.batch import Batch
from engine.core.native import Kernels, PagedBatch, PagedShape
from engine.plugins.attention._rows import Rows, rows_of

MANY = 1024  # layers that are remembered


class InPlaceAttention:
    """Causal attention that reads K and V where they are. Mutates K and V pages in ``write`` only.

    Args:
        kernels: the compiled kernels.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._batch = PagedBatch()
        self._at = ctypes.byref(self._batch)
        self._kept: Rows | None = None  # what it points at
        self._layers: dict[tuple[int, int], _Pages] = {}

    def plan_batch(self, batch: Batch) -> None:
        """Lay out lengths and page tables, once for all layers. Replaces those of the step before."""
        rows = self._kept = rows_of(batch)
        arrays = (rows.starts, rows.counts, rows.firsts, rows.table, rows.pages)
        self._batch = PagedBatch(*(array.ctypes.data for array in arrays), len(rows.starts), rows.size)
        self._at = ctypes.byref(self._batch)

    @property
    def batch(self) -> PagedBatch:
        """What ``plan_batch`` has laid out."""
        return self._batch

    def write(self, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Store ``keys`` and ``values [tokens, kv_heads, head_dim]``. Mutates the pages."""
        keys, values, pages = _rows(keys), _rows(values), self._pages(k_pages, v_pages)
        k_token, k_head, _ = keys.stride()
        v_token, v_head, _ = values.stride()
        self._kernels.write(
            *(self._at, keys.data_ptr(), k_token, k_head, values.data_ptr(), v_token, v_head),
            *(ctypes.byref(pages.shape), pages.k, pages.v, torch.get_num_threads()),
        )

    def attend(self, query: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float) -> Tensor:
        """Attention of ``query [tokens, heads, head_dim]``; the answer is new, ``[tokens, heads, v_head_dim]``."""
        query, pages = _rows(query), self._pages(k_pages, v_pages)
        tokens, heads, _ = query.shape
        token, head, _ = query.stride()
        pages.shape.heads = heads
        out = torch.empty(tokens, heads, pages.shape.v_dim)
        self._kernels.attend(
            *(self._at, ctypes.byref(pages.shape), query.data_ptr(), token, head, pages.k, pages.v, scale),
            *(out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def _pages(self, k_pages: Tensor, v_pages: Tensor) -> _Pages:
        """What the kernels are told of a layer's memory: the same at every step. It is looked at only once."""
        key = id(k_pages), id(v_pages)
        known = self._layers.get(key)
        if known is None or known.tensors[0] is not k_pages:
            if k_pages.dtype is not torch.float32 or not (k_pages.is_contiguous() and v_pages.is_contiguous()):
                raise ValueError(f"attention cpu reads whole pages of float32, not of {k_pages.dtype}")
            shape = PagedShape(0, k_pages.shape[2], k_pages.shape[3], v_pages.shape[3])
            if len(self._layers) >= MANY:
                self._layers.clear()
            known = _Pages((k_pages, v_pages), k_pages.data_ptr(), v_pages.data_ptr(), shape)
            self._layers[key] = known
        return known


class _Pages(NamedTuple):
    """A layer's K and V (kept, so that their identity means something), their addresses, their shape."""

    tensors: tuple[Tensor, Tensor]
    k: int
    v: int
    shape: PagedShape


def _rows(tensor: Tensor) -> Tensor:
    """The tensor, its heads' numbers side by side."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
