"""The sizes of a model that its cost follows from: from its ``config.json``, or of a few well-known ones by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from engine.core.errors import ModelError
from engine.core.models.hf_dir import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and a gated MLP, or experts in its place.

    Attributes:
        inner: width of the MLP, or of one expert.
        experts: experts of a layer, ``active`` of which compute a token; 1 and 1: there are none.
        shared: width of an expert that computes every token; 0: there is none.
        tied: output embedding and input embedding are the same numbers.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    max_length: int
    experts: int = 1
    active: int = 1
    shared: int = 0
    tied: bool = False

    @property
    def attention_weights(self) -> int:
        """Numbers in the projections of all layers' attention."""
        return self.layers * self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Numbers in one expert of every layer (or in the MLP): gate, up, down."""
        return self.layers * 3 * self.hidden * self.inner

    @property
    def fixed_weights(self) -> int:
        """Numbers that every step reads, whatever it computes: all but experts and embeddings."""
        router = self.layers * self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_weights + router + self.layers * 3 * self.hidden * self.shared

    @property
    def output_weights(self) -> int:
        """Numbers in the output embedding."""
        return self.hidden * self.vocab

    @property
    def weights(self) -> int:
        """Numbers of the model (norms and biases left out: parts of a thousand)."""
        embeddings = self.output_weights * (1 if self.tied else 2)
        return self.fixed_weights + self.experts * self.expert_weights + embeddings

    @property
    def weights_a_token(self) -> int:
        """Numbers that a token is multiplied with, the output embedding left out."""
        return self.fixed_weights + self.active * self.expert_weights

    @property
    def kv_numbers(self) -> int:
        """Numbers of K and V of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def experts_read(self, tokens: int) -> float:
        """Experts of a layer that a step of so many tokens reads, if each token picks any of them equally often."""
        if self.experts == 1:
            return 1.0
        return self.experts * (1 - (1 - self.active / self.experts) ** tokens)


def _shape(name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, length: int,
           head_dim: int = 128, **more: Any) -> ModelShape:  # fmt: skip
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, inner=inner,
        vocab=vocab, max_length=length, **more,
    )  # fmt: skip


SHAPES = {
    shape.name: shape
    for shape in (
        _shape("smollm2-135m", 30, 576, 9, 3, 1536, 49_152, 8192, 64, tied=True),
        _shape("smollm2-1.7b", 24, 2048, 32, 32, 8192, 49_152, 8192, 64, tied=True),
        _shape("llama-3-8b", 32, 4096, 32, 8, 14_336, 128_256, 8192),
        _shape("llama-3.1-8b", 32, 4096, 32, 8, 14_336, 128_256, 131_072),
        _shape("llama-3-70b", 80, 8192, 64, 8, 28_672, 128_256, 8192),
        _shape("llama-3.1-70b", 80, 8192, 64, 8, 28_672, 128_256, 131_072),
        _shape("llama-3.1-405b", 126, 16_384, 128, 8, 53_248, 128_256, 131_072),
        _shape("mistral-7b", 32, 4096, 32, 8, 14_336, 32_768, 32_768),
        _shape("mixtral-8x7b", 32, 4096, 32, 8, 14_336, 32_000, 32_768, experts=8, active=2),
        _shape("qwen2.5-7b", 28, 3584, 28, 4, 18_944, 152_064, 32_768),
        _shape("qwen3-8b", 36, 4096, 32, 8, 12_288, 151_936, 40_960),
        _shape("qwen3-32b", 64, 5120, 64, 8, 25_600, 151_936, 40_960),
        _shape("qwen3-30b-a3b", 48, 2048, 32, 4, 768, 151_936, 40_960, experts=128, active=8),
    )
}
"""By name. Source: the models' own ``config.json``."""


def shape(model: str) -> ModelShape:
    """A model by its name in the table, or from a directory with a ``config.json``, or such a file.

    Of a name, an organisation in front and ``-instruct`` or ``-chat`` behind are not looked at.

    Raises:
        ModelError: it is not known, or its config is not one of a model whose cost is known here.
    """
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return of_config(read_json(path), path.parent.name or str(path))
    name = model.rpartition("/")[2].lower().replace("_", "-").replace("meta-llama", "llama")
    for ending in ("-instruct", "-chat", "-hf"):
        name = name.removesuffix(ending)
    known = SHAPES.get(name)
    if known is None:
        close = get_close_matches(name, list(SHAPES), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(SHAPES)}"
        raise ModelError(f"model {model!r} is not known: {hint} (or give its config.json)")
    return known if model == known.name else replace(known, name=model)


def of_config(data: Mapping[str, Any], name: str) -> ModelShape:
    """From the values of a ``config.json``. Raises ``ModelError`` where they do not say it, or not such a model."""
    if data.get("kv_lora_rank"):
        raise ModelError(f"model {name!r} has multi-head latent attention: its cost is not known here")
    if isinstance(data.get("text_config"), Mapping):
        data = data["text_config"]
    try:
        hidden, heads = int(data["hidden_size"]), int(data["num_attention_heads"])
        experts = data.get("num_local_experts") or data.get("num_experts") or data.get("n_routed_experts")
        inner = data.get("moe_intermediate_size") if experts else None
        return ModelShape(
            name=name, layers=int(data["num_hidden_layers"]), hidden=hidden, heads=heads,
            kv_heads=int(data.get("num_key_value_heads") or heads),
            head_dim=int(data.get("head_dim") or hidden // heads),
            inner=int(inner or data["intermediate_size"]), vocab=int(data["vocab_size"]),
            max_length=int(data["max_position_embeddings"]), tied=bool(data.get("tie_word_embeddings", False)),
            experts=int(experts or 1), active=int(data.get("num_experts_per_tok") or 1) if experts else 1,
            shared=int(data.get("shared_expert_intermediate_size") or 0) if experts else 0,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"the config of model {name!r} does not say how large it is: {what}") from error
