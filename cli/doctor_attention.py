"""What ``engine doctor`` says of attention: which backends can compute this model here, and why the others cannot."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from engine.cli.findings import Finding
from engine.core.batch import AttentionLayer
from engine.core.config import EngineConfig
from engine.core.errors import EngineError
from engine.core.protocols import Attention
from engine.core.registry import Registry, make

CHOOSERS = frozenset({"auto", "split"})  # backends that leave it to others


def place(config: EngineConfig) -> tuple[str, str]:
    """Where the executor computes, and in which type."""
    options = config.executor.options
    device, dtype = str(options.get("device", "auto")), str(options.get("dtype", "float32"))
    if device == "auto":
        device = "cuda" if _torch_has_cuda() else "cpu"
    return device, dtype


def backends(config: EngineConfig, layer: AttentionLayer | None) -> Iterator[Finding]:
    """A line for each installed backend. FlashInfer and its like are imported only where a device is.

    Args:
        layer: what the model's layers are like; ``None``: not known.
    """
    device, dtype = place(config)
    for line in Registry().listing():
        if line.role == "attention" and line.status == "ok" and line.name not in CHOOSERS:
            yield _asked(line.name, device, dtype, layer)


def layer_of(shape: Mapping[str, Any], kv_dtype: str) -> AttentionLayer | None:
    """A layer as a model's ``config.json`` tells of it; ``None``: it does not.

    Args:
        kv_dtype: type of pages, where it is not that of what is computed.
    """
    heads = shape.get("num_attention_heads")
    hidden = shape.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        return None
    dim = shape.get("head_dim") or hidden // heads
    window = shape.get("sliding_window") if shape.get("use_sliding_window", True) else None
    return AttentionLayer(
        heads=heads,
        kv_heads=shape.get("num_key_value_heads") or heads,
        k_dim=dim,
        v_dim=dim,
        scale=dim**-0.5,
        window=window,
        soft_cap=shape.get("attn_logit_softcapping"),
        kv_dtype=kv_dtype,
    )


def _asked(name: str, device: str, dtype: str, layer: AttentionLayer | None) -> Finding:
    where = f"attention {name}"
    try:
        backend = make("attention", name)
        assert isinstance(backend, Attention)
        try:
            words = backend.prepare(device=device, dtype=dtype)
            if layer is not None:
                if lacking := layer.needs - backend.provides:
                    what = ", ".join(sorted(offer.removeprefix("attention:") for offer in lacking))
                    return Finding("absent", where, f"cannot: it does not compute what the model has: {what}")
                words = backend.expect([layer]) or words
        finally:
            backend.close()
    except EngineError as error:
        return Finding("absent", where, f"cannot: {error}")
    return Finding("ok", where, f"can, {dtype} on {device}: {words}")


def _torch_has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())
