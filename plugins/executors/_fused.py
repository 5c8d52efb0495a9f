"""Decoders of the Llama family without transformers' forward: a few calls of the compiled kernels for each layer.

transformers' own code stays the definition: a fused decoder is taken only where, when the model is loaded, it answers a
few tokens as transformers does.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.core.native import Kernels, LayerSpec, LayersSpec, Rooms
from engine.plugins.executors._native import NativeLinear
from engine.plugins.executors._paged import Compiled, Layer, PagedLayers, active

FAMILY = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
NOTHING: dict[str, Any] = {"attention_mask": None}
PROBE = 5  # tokens that both ways must answer alike
CLOSE = 1e-3  # largest difference of logits, as a part of the largest logit
LINEARS = {
    "self_attn": {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"},
    "mlp": {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
}


class NotFused(Exception):
    """The decoder runs through transformers; the message says why."""


class _Block(NamedTuple):
    """A layer: for the kernels, where that lies, and its attention module, with its scale."""

    spec: LayerSpec
    at: Any
    attention: nn.Module
    scale: float


class FusedDecoder:
    """A decoder whose linear layers are ``NativeLinear``, run layer by layer over paged KV.

    Raises:
        NotFused: it is built otherwise, or its answers are others than transformers'.
    """

    def __init__(self, module: nn.Module, kernels: Kernels) -> None:
        if type(module).__name__ not in FAMILY or module.config.hidden_act != "silu":
            raise NotFused(f"{type(module).__name__} is not of the Llama family")
        self._kernels, self._decoder, self._head = kernels, module.model, module.lm_head
        if not isinstance(self._head, NativeLinear) or module.model.norm.weight.dtype is not torch.float32:
            raise NotFused("its weights are not in the kernels' layout")
        self._blocks: list[_Block] = []
        self._rooms: dict[str, Tensor] = {}
        self._cosine = self._sine = torch.empty(0, 0)
        self.refresh()
        self._compare(module)

    def refresh(self) -> None:
        """Weights were replaced: those outside of linear layers lie elsewhere now. Mutates."""
        layers = list(self._decoder.layers)
        modules = [layer.self_attn for layer in layers]
        self._specs = (LayerSpec * len(layers))(*map(_spec, layers))
        self._scales = (ctypes.c_float * len(layers))(*(module.scaling for module in modules))
        self._blocks = [
            _Block(spec, ctypes.byref(spec), module, module.scaling)
            for spec, module in zip(self._specs, modules, strict=True)
        ]

    def run(self, ids: Tensor, positions: Tensor, keep: Tensor, layer: Layer) -> Tensor:
        """Logits ``[kept, vocab]`` of the tokens at indices ``keep`` of a flattened batch ``ids, positions [tokens]``.

        ``layer`` is asked for every layer's attention, or does all of it in the kernels, where it can.
        """
        return self.logits(self.states(ids, positions, keep, layer))

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` of hidden states ``[rows, width]``."""
        if not len(states):
            return torch.empty(0, self._head.out_features)
        logits: Tensor = self._head(states)
        return logits

    def states(self, ids: Tensor, positions: Tensor, keep: Tensor, layer: Layer) -> Tensor:
        """As ``run``, hidden states ``[kept, width]`` after the final norm.

        After the last layer's attention, only the kept rows are computed.
        """
        x = self._decoder.embed_tokens(ids)
        turns = self._turns(positions)
        compiled = layer.compiled() if isinstance(layer, PagedLayers) else None
        x = self._at_once(x, turns, keep, compiled) if compiled else self._one_by_one(x, turns, keep, layer)
        return self._normed(x)

    def _at_once(self, x: Tensor, turns: tuple[Tensor, Tensor], keep: Tensor, compiled: Compiled) -> Tensor:
        """The kept rows of ``x [tokens, width]`` after all layers. Mutates ``x``, and KV memory."""
        rows, width = x.shape
        first = self._blocks[0].spec
        attended = self._room("attended", rows, first.heads, first.v.n // first.kv_heads)
        rooms = Rooms(*(room.data_ptr() for room in (*self._sides(rows), attended, *self._between(rows, width))))
        where = ctypes.addressof(self._specs), ctypes.addressof(self._scales), compiled.pages
        spec = LayersSpec(*where, len(self._blocks))
        self._kernels.layers(
            *(ctypes.byref(spec), ctypes.byref(compiled.batch), keep.data_ptr(), len(keep), x.data_ptr(), rows),
            *(*(turn.data_ptr() for turn in turns), ctypes.byref(rooms), torch.get_num_threads()),
        )
        return x[: len(keep)]

    def _sides(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for a layer's q, k and v."""
        first = self._blocks[0].spec
        return (
            self._room("q", rows, first.heads, first.dim),
            self._room("k", rows, first.kv_heads, first.dim),
            self._room("v", rows, first.kv_heads, first.v.n // first.kv_heads),
        )

    def _between(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Memory for a layer's normed rows, and for its hidden ones."""
        return self._room("scratch", rows, width), self._room("hidden", rows, self._blocks[0].spec.gate.n)

    def _one_by_one(self, x: Tensor, turns: tuple[Tensor, Tensor], keep: Tensor, layer: Layer) -> Tensor:
        """The kept rows of ``x [tokens, width]`` after all layers. Mutates ``x``."""
        kernels, threads = self._kernels, torch.get_num_threads()
        rows, width = x.shape
        cosine, sine = turns
        q, k, v = self._sides(rows)
        scratch, hidden = self._between(rows, width)
        turned = (cosine.data_ptr(), sine.data_ptr(), *(room.data_ptr() for room in (q, k, v, scratch)), threads)
        after = (scratch.data_ptr(), hidden.data_ptr(), threads)
        for number, (_, at, attention, scale) in enumerate(self._blocks, 1):
            kernels.before(at, x.data_ptr(), rows, *turned)
            attended = layer(attention, q, k, v, scale, NOTHING).contiguous()
            if number == len(self._blocks):
                attended, x, rows = attended[keep], x[keep], len(keep)
            kernels.after(at, attended.data_ptr(), rows, x.data_ptr(), *after)
        return x

    def _normed(self, x: Tensor) -> Tensor:
        """The last layer's output ``[rows, width]`` after the final norm."""
        rows, width = x.shape
        norm = self._decoder.norm
        normed = torch.empty_like(x)
        self._kernels.norm(
            *(x.data_ptr(), norm.weight.data_ptr(), norm.variance_epsilon, rows, width, normed.data_ptr())
        )
        return normed

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions, ``[tokens, dim / 2]``, out of a table that grows as it is needed."""
        last = int(positions.max())
        if last >= self._cosine.shape[0]:
            known = max(512, 2 << last.bit_length())
            both = self._decoder.rotary_emb(torch.empty(0), torch.arange(known)[None])
            half = self._blocks[0].spec.dim // 2
            self._cosine, self._sine = (side[0, :, :half].contiguous() for side in both)
        return self._cosine[positions], self._sine[positions]

    def _room(self, name: str, rows: int, *shape: int) -> Tensor:
        """Memory ``[rows, *shape]`` of unknown content that is used again and again."""
        room = self._rooms.get(name)
        if room is None or room.shape[0] < rows:
            room = self._rooms[name] = torch.empty(rows, *shape)
        return room[:rows]

    def _compare(self, module: nn.Module) -> None:
        """Both ways on a few tokens."""
        ids, positions = torch.arange(1, PROBE + 1) % module.config.vocab_size, torch.arange(PROBE)
        with torch.inference_mode(), active(dense):
            wanted = module(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
            found = self.run(ids, positions, positions, dense)
        apart = float((found - wanted).abs().max() / wanted.abs().max())
        if not apart < CLOSE:
            raise NotFused(f"its logits would differ from transformers' by {apart:.1e} of the largest")


def _spec(layer: nn.Module) -> LayerSpec:
    """A decoder layer for the kernels. Raises ``NotFused``."""
    attention = layer.self_attn
    parts: dict[str, Any] = {}
    for path, names in LINEARS.items():
        for name, part in names.items():
            linear = getattr(layer.get_submodule(path), name, None)
            if not isinstance(linear, NativeLinear):
                raise NotFused(f"it has no {path}.{name} in the kernels' layout")
            parts[part] = linear.spec
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name, None)
        parts[name] = None if norm is None else norm.weight.data_ptr()
    dim = attention.head_dim
    return LayerSpec(
        norm1=layer.input_layernorm.weight.data_ptr(),
        norm2=layer.post_attention_layernorm.weight.data_ptr(),
        heads=parts["q"].n // dim,
        kv_heads=parts["k"].n // dim,
        dim=dim,
        eps=layer.input_layernorm.variance_epsilon,
        **parts,
    )


def dense(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, kwargs: dict[str, Any]) -> Tensor:
    """Causal attention of a lone sequence ``[tokens, heads, dim]`` without pages."""
    q, k, v = (side.transpose(0, 1)[None] for side in (q, k, v))
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    answer: Tensor = heads[0].transpose(0, 1)
    return answer
