"""Attention by FlashInfer's kernels: paged decode, prefill, mixed batches, prefixes that rows share read once.

This module is cheap to import. FlashInfer itself, seconds of work, is imported where a CUDA device can use it, or where
nobody asked before the first batch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from engine.core.batch import AttentionLayer, Batch
from engine.core.config import parse_bytes
from engine.core.errors import ConfigError, one_line
from engine.core.protocols import Attention, Context, PluginOptions

if TYPE_CHECKING:
    from torch import Tensor

    from engine.plugins.attention._flashinfer import FlashInferKernels

DTYPES = ("float16", "bfloat16")
OLDEST = (8, 0)  # compute capability
LEAST_WORKSPACE = 32 << 20  # what prefills of many heads take for their parts on the largest devices


class FlashInferOptions(PluginOptions):
    """Options of backend ``flashinfer``."""

    mixed: Literal["split", "prefill", "batch"] = Field(
        "split",
        description="how prefills and decodes of one step are computed: each by its own kernels; all by those for "
        "prefills; or by one kernel for both (BatchAttention, which takes 384 MiB of its own)",
    )
    cascade: int | None = Field(
        None, ge=1, description="tokens of a prefix that decodes share from which it is read once for all; none: never"
    )
    cascade_rows: int = Field(8, ge=2, description="decodes that must share it")
    workspace: str = Field("128MiB", description="device memory for what kernels put together from parts of a row")
    tensor_cores: Literal["auto", "always", "never"] = Field(
        "auto", description="decodes on tensor cores; auto: from four query heads to a KV head on, and for fp8 KV"
    )

    @field_validator("workspace")
    @classmethod
    def _enough(cls, value: str) -> str:
        if parse_bytes(value) < LEAST_WORKSPACE:
            raise ValueError("must be at least 32MiB")
        return value


class FlashInferAttention(Attention):
    """Causal attention over paged K and V of type float16 or bfloat16, or fp8 under such queries, on CUDA devices.

    Handles batches that mix prefill chunks and decodes, grouped-query attention, sliding windows, capped scores, any
    page size and any order of pages; heads of 64, 128 or 256 numbers. Mutates K and V pages in ``write`` only.

    Source: FlashInfer (Ye et al., 2025, "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference
    Serving"). What is called of it is recorded, with its defaults, and compared where it is installed.
    """

    name = "flashinfer"
    provides = frozenset(
        {
            "attention:prefill", "attention:decode", "attention:mixed", "attention:window", "attention:soft-cap",
            "attention:fp8-kv", "attention:graphs", "attention:cascade",
        }
    )  # fmt: skip
    Options = FlashInferOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._impl: FlashInferKernels | None = None
        self._dtype = "bfloat16"
        self._most_pages = 0

    def prepare(self, *, device: str, dtype: str) -> str:
        """Import FlashInfer. Raises ``ConfigError``: another type, no device that it knows, not installed, no compiler
        for its kernels."""
        name = _device(device, dtype)
        _installed()
        try:
            self._impl, self._dtype = self._made(device), dtype
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(f"attention flashinfer cannot be imported: {one_line(error)}") from error
        return f"flashinfer {version('flashinfer-python')} ({name}, mixed batches by {self.options.mixed})"

    def expect(self, layers: Sequence[AttentionLayer]) -> None:
        """Compile the kernels for them, which may take a minute once a machine: they are kept in the user's cache.

        Raises:
            ConfigError: heads or types without kernels, or no kernel can be compiled.
        """
        self._planned.expect(layers, self._dtype)

    def start(self, context: Context) -> None:
        """Learn how long a row may become: graphs have memory for that."""
        limits = context.limits
        self._most_pages = -(-limits.max_model_len // limits.page_size)
        if self._impl is not None:
            self._impl.most_pages = self._most_pages

    def plan_batch(self, batch: Batch) -> None:
        """Lay out lengths and page tables, once for all layers. Replaces those of the step before."""
        if self._impl is None:
            self._impl = self._made(str(batch.device))
        self._impl.plan_batch(batch)

    def plan_graph(self, batch: Batch) -> None:
        """Plan decodes for the graph of so many rows. Raises ``RuntimeError`` before ``expect`` and ``start``."""
        self._planned.plan_graph(batch)

    def write(self, keys: Tensor, values: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
        """Store ``keys`` and ``values [tokens, kv_heads, head_dim]`` where ``plan_batch`` says. Mutates the pages."""
        self._planned.write(keys, values, k_pages, v_pages)

    def attend(
        self,
        query: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Attention of ``query [tokens, heads, head_dim]``; the answer is new, of the same shape and type.

        Raises:
            ValueError: heads of a size, or types, that its kernels do not have.
        """
        return self._planned.attend(query, k_pages, v_pages, scale, window=window, soft_cap=soft_cap)

    def close(self) -> None:
        """Let go of the workspace and of the pages."""
        self._impl = None

    def _made(self, device: str) -> FlashInferKernels:
        from engine.plugins.attention._flashinfer import FlashInferKernels

        return FlashInferKernels(self._library(), self.options, device, self._most_pages)

    def _library(self) -> Any:
        """FlashInfer, or what stands in for it."""
        return importlib.import_module("flashinfer")

    @property
    def _planned(self) -> FlashInferKernels:
        if self._impl is None:
            raise RuntimeError("attention flashinfer: prepare() or plan_batch() comes first")
        return self._impl


def _device(device: str, dtype: str) -> str:
    """The device's name. Raises ``ConfigError`` where it cannot be computed on."""
    import torch

    seen = torch.cuda.is_available()
    if torch.device(device).type != "cuda":
        words = "" if seen else "; torch sees none here"
        raise ConfigError(f"attention flashinfer computes on CUDA devices, not on {device}{words}")
    if dtype not in DTYPES:
        raise ConfigError(f"attention flashinfer computes float16 and bfloat16, not {dtype}")
    if not seen:
        raise ConfigError("attention flashinfer: torch sees no CUDA device here")
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise ConfigError(
            f"attention flashinfer needs compute capability 8.0; {name} has {'.'.join(map(str, capability))}"
        )
    return f"{name}, sm_{capability[0]}{capability[1]}"


def _installed() -> None:
    """Raises ``ConfigError`` where FlashInfer is not there, or could not compile its kernels. Imports nothing."""
    if importlib.util.find_spec("flashinfer") is None:
        raise ConfigError("attention flashinfer: FlashInfer is not installed: pip install 'sixhooks[gpu]'")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(home, "bin"))
    if nvcc is None and importlib.util.find_spec("flashinfer_jit_cache") is None:
        raise ConfigError(
            "attention flashinfer compiles its kernels when they are first used, and there is no nvcc: install the "
            "CUDA toolkit and set CUDA_HOME, or let `flashinfer download-kernels` install compiled ones"
        )
