"""The computing part of backend ``cpu``: page tables as arrays that grow, and calls of the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.batch import Batch
from engine.core.native import Kernels, PagedBatch, PagedShape


class InPlaceAttention:
    """Causal attention that reads K and V where they are. Mutates K and V pages in ``write`` only.

    Args:
        kernels: the compiled kernels.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._batch = PagedBatch()
        self._kept: tuple[NDArray[np.int64] | NDArray[np.int32], ...] = ()

    def plan_batch(self, batch: Batch) -> None:
        """Lay out lengths and page tables, once for all layers. Replaces those of the step before."""
        size = batch.page_size
        starts, counts = np.array(batch.starts, np.int64), np.array(batch.counts, np.int64)
        used = -(-(starts + counts) // size)
        offsets = np.zeros(len(starts), np.int64)
        np.cumsum(used[:-1], out=offsets[1:])
        firsts = np.zeros(len(starts), np.int64)
        np.cumsum(counts[:-1], out=firsts[1:])
        pages = _together(batch.pages, used.tolist(), size)
        self._kept = (starts, counts, firsts, offsets, pages)
        self._batch = PagedBatch(*(array.ctypes.data for array in self._kept), len(starts), size)

    def write(self, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Store ``keys`` and ``values [tokens, kv_heads, head_dim]``. Mutates the pages."""
        keys, values = _rows(keys), _rows(values)
        shape = PagedShape(0, k_pages.shape[2], k_pages.shape[3], v_pages.shape[3])
        self._kernels.write(
            ctypes.byref(self._batch),
            *(keys.data_ptr(), keys.stride(0), keys.stride(1)),
            *(values.data_ptr(), values.stride(0), values.stride(1)),
            *(ctypes.byref(shape), k_pages.data_ptr(), v_pages.data_ptr()),
        )

    def attend(self, query: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float) -> Tensor:
        """Attention of ``query [tokens, heads, head_dim]``; the answer is new, ``[tokens, heads, v_head_dim]``."""
        query = _rows(query)
        tokens, heads, _ = query.shape
        out = torch.empty(tokens, heads, v_pages.shape[3])
        shape = PagedShape(heads, k_pages.shape[2], k_pages.shape[3], v_pages.shape[3])
        self._kernels.attend(
            *(ctypes.byref(self._batch), ctypes.byref(shape)),
            *(query.data_ptr(), query.stride(0), query.stride(1)),
            *(k_pages.data_ptr(), v_pages.data_ptr(), scale, out.data_ptr(), torch.get_num_threads()),
        )
        return out


def _rows(tensor: Tensor) -> Tensor:
    """The tensor, its heads' numbers side by side."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _together(tables: Sequence[Sequence[int]], used: Sequence[int], size: int) -> NDArray[np.int32]:
    """The used part of every table, one after the other."""
    pages: list[int] = []
    for row, (table, count) in enumerate(zip(tables, used, strict=True)):
        if len(table) < count:
            raise ValueError(f"row {row} needs {count} pages of {size} and has {len(table)}")
        pages += table[:count]
    return np.array(pages, np.int32)
