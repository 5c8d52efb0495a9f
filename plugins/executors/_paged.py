"""The bridge between transformers' attention interface and an attention plugin over paged KV.

transformers calls one registered function for every layer of every model. What it stands for in a given call (a probe,
or a step of one of several engines in this process) is looked up in a context variable.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.core.batch import AttentionLayer
from engine.core.errors import ConfigError, ExecutionError, ModelError
from engine.core.native import PagedBatch
from engine.core.protocols import Attention
from engine.core.registry import Registry
from engine.plugins.executors._shared import zeros

IMPLEMENTATION = "engine_paged"

Layer = Callable[[nn.Module, Tensor, Tensor, Tensor, float, dict[str, Any]], Tensor]
_current: ContextVar[Layer] = ContextVar("engine_paged_layer")

# What other kinds of attention hand to the interface; standard attention leaves each at None.
UNSUPPORTED = {
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}
FEATURES = {
    "attention:window": "a sliding window",
    "attention:soft-cap": "capped scores",
}


def register() -> None:
    """Make ``IMPLEMENTATION`` known to transformers. Mutates its registries; idempotent."""
    AttentionInterface.register(IMPLEMENTATION, _attention)


@contextmanager
def active(layer: Layer) -> Iterator[None]:
    """Let ``layer`` answer transformers' attention calls of this thread (or task) inside the block."""
    token = _current.set(layer)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Layer:
    """Who answers attention calls here and now. Raises ``ExecutionError`` outside of ``active``."""
    layer = _current.get(None)
    if layer is None:
        raise ExecutionError(f"attention {IMPLEMENTATION!r} was called outside a step of an engine")
    return layer


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' side: ``[1, heads, tokens, head_dim]`` in, ``[1, tokens, heads, head_dim]`` out."""
    layer = current()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (side[0].transpose(0, 1) for side in (query, key, value))
    return layer(module, q, k, v, scale, {**kwargs, "attention_mask": attention_mask}).unsqueeze(0), None


class LayerShape(NamedTuple):
    """What a layer's attention needs of KV memory, and how it is computed."""

    layer: int
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def features(self) -> dict[str, Any]:
        """What ``Attention.attend`` is told besides, of this layer: nothing of a plain one."""
        both = {"window": self.window, "soft_cap": self.soft_cap}
        return {name: value for name, value in both.items() if value is not None}


def introduce(attention: Attention, shapes: Sequence[LayerShape], words: str, kv_dtype: str = "") -> str:
    """Tell a backend of the model's layers. Returns, in words, what will compute. Mutates the backend.

    Args:
        words: what ``prepare`` said.
        kv_dtype: type of pages, where it is not that of queries.

    Raises:
        ModelError: layers have what the backend does not provide; names those that do.
        ConfigError: it cannot compute them for another reason, or does not read the type of the pages.
    """
    layers = [
        AttentionLayer(
            heads=shape.heads, kv_heads=shape.kv_heads, k_dim=shape.k_dim, v_dim=shape.v_dim, scale=shape.scale,
            window=shape.window, soft_cap=shape.soft_cap, kv_dtype=kv_dtype,
        )
        for shape in shapes
    ]  # fmt: skip
    words = attention.expect(layers) or words
    for need in sorted({need for layer in layers for need in layer.needs}):
        if need not in attention.provides:
            able = [f"--attention {entry.name}" for entry in Registry().providers(need) if entry.role == "attention"]
            if need == "attention:fp8-kv":
                words = " or ".join([*able, "leave kv_dtype at auto"])
                raise ConfigError(f"KV of fp8 is asked for, which attention {attention.name} does not read: {words}")
            raise ModelError(
                f"the model's layers have {FEATURES[need]}, which attention {attention.name} does not compute: "
                f"choose {' or '.join(able) or 'another model: no installed backend does'}"
            )
    return words


@dataclass(slots=True)
class Probe:
    """Stands in for attention once, to learn each layer's shape and to refuse what paged attention does not compute."""

    layers: list[LayerShape] = field(default_factory=list)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, kwargs: dict[str, Any]
    ) -> Tensor:
        for name, words in UNSUPPORTED.items():
            if kwargs.get(name) is not None:
                raise ModelError(f"{type(module).__name__} uses {words} ({name}): paged attention has no such thing")
        if kwargs["attention_mask"] is not None or not getattr(module, "is_causal", True):
            raise ModelError(f"{type(module).__name__} is not plain causal self-attention")
        index = getattr(module, "layer_idx", None)
        if index is None or any(known.layer == index for known in self.layers) or k.shape[0] != q.shape[0]:
            raise ModelError(f"{type(module).__name__}: attention that does not belong to one layer of a decoder")
        features = kwargs.get("sliding_window"), kwargs.get("softcap")
        self.layers.append(LayerShape(index, q.shape[1], k.shape[1], k.shape[2], v.shape[2], scale, *features))
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])


class Compiled(NamedTuple):
    """A planned batch, and where the addresses of K and then V of each layer lie."""

    batch: PagedBatch
    pages: int


class PagedLayers:
    """All layers' KV memory, and the attention plugin that works on it.

    Attribute ``shared``: where it lies for other processes; ``None``: it does not.
    """

    def __init__(
        self, attention: Attention, shapes: Sequence[LayerShape], num_pages: int, page_size: int, dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self._attention = attention
        sides = [
            (num_pages, page_size, shape.kv_heads, size) for shape in shapes for size in (shape.k_dim, shape.v_dim)
        ]
        tensors, self.shared = zeros(sides, dtype, torch.device(device))
        self._pages = {shape.layer: (tensors[2 * at], tensors[2 * at + 1]) for at, shape in enumerate(shapes)}
        self._features = {shape.layer: shape.features for shape in shapes}
        self._addresses = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        self._plain = not any(self._features.values()) and all(
            tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in tensors
        )

    def compiled(self) -> Compiled | None:
        """What the compiled kernels need to do all layers' attention of the planned batch; ``None``: they cannot."""
        batch = self._attention.compiled_batch() if self._plain else None
        return None if batch is None else Compiled(batch, ctypes.addressof(self._addresses))

    @property
    def pages(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Layer index -> its K and V, ``[num_pages, page_size, kv_heads, head_dim]``: the memory itself, no copy."""
        return self._pages

    def close(self) -> None:
        """No further process can map the memory. Idempotent."""
        if self.shared is not None:
            os.close(self.shared.fd)
            self.shared = None

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, kwargs: dict[str, Any]
    ) -> Tensor:
        k_pages, v_pages = self._pages[module.layer_idx]
        self._attention.write(k, v, k_pages, v_pages)
        attended: Tensor = self._attention.attend(q, k_pages, v_pages, scale, **self._features[module.layer_idx])
        return attended
