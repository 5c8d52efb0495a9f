"""Attention for the CPU, compiled: pages are read where they are.

This module is cheap to import; the kernels, and torch with them, come at the first batch (``_cpu``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.core.batch import Batch
from engine.core.errors import ConfigError
from engine.core.native import NoKernels, PagedBatch, find_compiler, instruction_set, kernels
from engine.core.protocols import Attention

if TYPE_CHECKING:
    from torch import Tensor

    from engine.plugins.attention._cpu import InPlaceAttention


class CPUAttention(Attention):
    """Causal attention over paged K and V of type float32, by kernels that are compiled on first use.

    Handles batches that mix prefill chunks and decodes, grouped-query attention, any page size and any order of pages.
    A row is answered alike, bit for bit, alone and in any batch, in one piece and in chunks. Mutates K and V pages in
    ``write`` only.
    """

    name = "cpu"
    provides = frozenset({"attention:prefill", "attention:decode", "attention:mixed"})

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._impl: InPlaceAttention | None = None

    def prepare(self, *, device: str, dtype: str) -> str:
        """Compile the kernels, once for each machine. Raises ``ConfigError``: another device or type, no compiler."""
        if (device, dtype) != ("cpu", "float32"):
            raise ConfigError(f"attention cpu computes float32 on the CPU, not {dtype} on {device}")
        self._impl = self._made()
        return f"cpu ({instruction_set()}, compiled by {find_compiler()})"

    def plan_batch(self, batch: Batch) -> None:
        """Lay out lengths and page tables, once for all layers. Raises ``ConfigError`` where kernels cannot be had."""
        if self._impl is None:
            self._impl = self._made()
        self._impl.plan_batch(batch)

    def compiled_batch(self) -> PagedBatch | None:
        """What ``plan_batch`` has laid out."""
        return self._planned.batch

    def write(self, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Store ``keys`` and ``values [tokens, kv_heads, head_dim]`` where ``plan_batch`` says. Mutates the pages."""
        self._planned.write(keys, values, k_pages, v_pages)

    def attend(
        self, query: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, *, window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of ``query [tokens, heads, head_dim]``; the answer is new, ``[tokens, heads, v_head_dim]``."""
        if window is not None or soft_cap is not None:
            raise ValueError("attention cpu computes neither sliding windows nor capped scores")
        return self._planned.attend(query, k_pages, v_pages, scale)

    def close(self) -> None:
        """Let go of the pages."""
        self._impl = None

    @staticmethod
    def _made() -> InPlaceAttention:
        try:
            compiled = kernels()
        except NoKernels as error:
            raise ConfigError(f"attention cpu: {error}") from error
        from engine.plugins.attention._cpu import InPlaceAttention

        return InPlaceAttention(compiled)

    @property
    def _planned(self) -> InPlaceAttention:
        if self._impl is None:
            raise RuntimeError("attention cpu: plan_batch() comes first")
        return self._impl
