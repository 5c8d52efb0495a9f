"""The reference attention backend: exact, and simple enough to be believed.

This module is cheap to import; the computing part, and torch with it, comes at the first batch (``_reference``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.core.batch import Batch
from engine.core.protocols import Attention

if TYPE_CHECKING:
    from torch import Tensor

    from engine.plugins.attention._reference import PagedAttention


class TorchAttention(Attention):
    """Causal attention over paged K and V in plain torch operations (``scaled_dot_product_attention``).

    Handles batches that mix prefill chunks and decodes, grouped-query attention, any page size and any order of pages,
    sliding windows and capped scores. Mutates K and V pages in ``write`` only.
    """

    name = "torch"
    provides = frozenset(
        {"attention:prefill", "attention:decode", "attention:mixed", "attention:window", "attention:soft-cap"}
    )

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._impl: PagedAttention | None = None

    def plan_batch(self, batch: Batch) -> None:
        """Build the index tensors of a step, once for all layers. Replaces those of the step before."""
        if self._impl is None:
            from engine.plugins.attention._reference import PagedAttention

            self._impl = PagedAttention()
        self._impl.plan_batch(batch)

    def write(self, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Store ``keys`` and ``values [tokens, kv_heads, head_dim]`` where ``plan_batch`` says. Mutates the pages."""
        self._planned.write(keys, values, k_pages, v_pages)

    def attend(
        self, query: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, *, window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of ``query [tokens, heads, head_dim]``; the answer is new, ``[tokens, heads, v_head_dim]``."""
        return self._planned.attend(query, k_pages, v_pages, scale, window, soft_cap)

    @property
    def _planned(self) -> PagedAttention:
        if self._impl is None:
            raise RuntimeError("attention torch: plan_batch() comes first")
        return self._impl
