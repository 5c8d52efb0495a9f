"""Attention for GPUs, by Triton's compiler: pages are read where they are.

This module is cheap to import; triton and torch come when the backend is prepared (``_triton``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import Field

from engine.core.batch import AttentionLayer, Batch
from engine.core.errors import ConfigError
from engine.core.protocols import Attention, Context, PluginOptions

if TYPE_CHECKING:
    from torch import Tensor

    from engine.plugins.attention._triton import Paged

DTYPES = ("float16", "bfloat16", "float32")
OLDEST = (8, 0)  # of a GPU
ON_CPU = (
    "attention triton computes on NVIDIA GPUs, not on the CPU: choose attention auto, or, to try its kernels, set "
    "TRITON_INTERPRET=1 in the environment before the engine starts"
)


class TritonOptions(PluginOptions):
    """Options of backend ``triton``."""

    split_tokens: int | None = Field(
        None,
        ge=64,
        multiple_of=64,
        description="keys of a piece of a long context (default: by the batch); set, a row's answer does not depend on "
        "its company",
    )


class TritonAttention(Attention):
    """Causal attention over paged K and V on NVIDIA GPUs; on the CPU in Triton's interpreter, to try the kernels.

    Handles batches that mix prefill chunks and decodes, grouped-query attention, any page size and any order of pages,
    heads of any size up to 256, sliding windows, capped scores, pages of fp8. Long contexts are cut in pieces that are
    worked on at the same time. Mutates K and V pages in ``write`` only.
    """

    name = "triton"
    provides = frozenset(
        {
            "attention:prefill", "attention:decode", "attention:mixed", "attention:window", "attention:soft-cap",
            "attention:fp8-kv", "attention:graphs",
        }
    )  # fmt: skip
    Options = TritonOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._impl: Paged | None = None
        self._dtype = "float32"
        self._layers: Sequence[AttentionLayer] = ()
        self._longest = 0

    def prepare(self, *, device: str, dtype: str) -> str:
        """Import Triton; kernels are compiled at their first launch. Raises ``ConfigError``: another device or type."""
        if dtype not in DTYPES:
            raise ConfigError(f"attention triton computes {', '.join(DTYPES)}, not {dtype}")
        self._dtype = dtype
        self._impl, words = self._made(device)
        return words

    def expect(self, layers: Sequence[AttentionLayer]) -> str | None:
        """Plan for these layers. Raises ``ConfigError``: a head of more than 256 numbers."""
        for layer in layers:
            if max(layer.k_dim, layer.v_dim) > 256:
                raise ConfigError(
                    f"attention triton takes heads of up to 256 numbers, not {max(layer.k_dim, layer.v_dim)}"
                )
        self._layers = layers
        if self._impl is not None:
            self._impl.expect(layers, self._dtype)
        return None

    def start(self, context: Context) -> None:
        """Note how long a request may become: graphs have room for as many pages. On a device, compile."""
        self._longest = context.limits.max_model_len
        if self._impl is not None:
            self._impl.limit(self._longest)
            self._impl.compile(self._layers, self._dtype, context.limits.page_size)

    def plan_batch(self, batch: Batch) -> None:
        """Lay out lengths and page tables, once for all layers. Raises ``ConfigError`` where Triton cannot be had."""
        self._prepared(batch).plan_batch(batch)

    def plan_graph(self, batch: Batch) -> None:
        """As ``plan_batch``, into tensors that stay where they are. Raises ``RuntimeError`` before ``expect`` and
        ``start``."""
        self._prepared(batch).plan_graph(batch)

    def write(self, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Store ``keys`` and ``values [tokens, kv_heads, head_dim]`` where the plan says. Mutates the pages."""
        self._planned.write(keys, values, k_pages, v_pages)

    def attend(
        self, query: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float, *, window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of ``query [tokens, heads, head_dim]``; the answer is new, ``[tokens, heads, v_head_dim]``."""
        return self._planned.attend(query, k_pages, v_pages, scale, window or 0, soft_cap or 0.0)

    def close(self) -> None:
        """Let go of index tensors and of the pages."""
        self._impl = None

    def _prepared(self, batch: Batch) -> Paged:
        """The computing part; where nobody prepared it, for the batch's device."""
        if self._impl is None:
            self._impl, _ = self._made(str(batch.device))
        return self._impl

    def _made(self, device: str) -> tuple[Paged, str]:
        if device == "cpu" and not os.environ.get("TRITON_INTERPRET"):
            raise ConfigError(ON_CPU)  # before anything is imported for it
        if find_spec("triton") is None:
            raise ConfigError("attention triton needs triton: pip install 'sixhooks[gpu]'")
        import torch
        import triton

        from engine.plugins.attention import _triton
        from engine.plugins.attention._triton_kernels import INTERPRETED

        place = torch.device(device)
        words = f"triton {triton.__version__} ({_machine(place, INTERPRETED)})"
        impl = _triton.Paged(place, _triton.processors(place), self.options.split_tokens)
        impl.expect(self._layers, self._dtype)
        impl.limit(self._longest)
        return impl, words

    @property
    def _planned(self) -> Paged:
        if self._impl is None:
            raise RuntimeError("attention triton: plan_batch() comes first")
        return self._impl


def _machine(device: Any, interpreted: bool) -> str:
    """What computes. Raises ``ConfigError`` where nothing can."""
    import torch

    if device.type == "cpu":
        if not interpreted:
            raise ConfigError(ON_CPU)
        return "interpreted on the CPU: to try the kernels, not to be fast"
    if device.type != "cuda":
        raise ConfigError(f"attention triton computes on NVIDIA GPUs (cuda), not on {device.type}")
    if interpreted:
        raise ConfigError("attention triton: TRITON_INTERPRET is set in the environment: unset it to compute on a GPU")
    if not torch.cuda.is_available():
        raise ConfigError("attention triton: torch sees no GPU: it needs a driver and a build of torch for CUDA")
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if (major, minor) < OLDEST:
        raise ConfigError(f"attention triton needs compute capability 8.0 or newer; {name} has {major}.{minor}")
    return f"{name}, sm_{major}{minor}"
