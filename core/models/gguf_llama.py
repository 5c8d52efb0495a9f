"""A GGUF model of the llama family as transformers knows it: config, weights under transformers' names, token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ModelError, suggest
from engine.core.models.gguf_file import GGUFFile

ARCHITECTURES = ("llama",)

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The ``config.json`` that transformers would have for this file. Does not mutate.

    Raises:
        ModelError: another architecture, experts, scaled RoPE, or a key is missing.
    """
    meta = file.metadata
    architecture = meta.get("general.architecture")
    if architecture not in ARCHITECTURES:
        hint = suggest(str(architecture), ARCHITECTURES)
        raise ModelError(f"{file.path.name}: GGUF architecture {architecture!r} is not supported ({hint})")
    if meta.get("llama.expert_count"):
        raise ModelError(f"{file.path.name}: mixture-of-experts GGUF models are not supported")
    if meta.get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in file.tensors:
        raise ModelError(f"{file.path.name}: GGUF models with scaled RoPE are not supported: use the HF directory")
    try:
        return _config(file)
    except KeyError as error:
        raise ModelError(f"{file.path.name}: the GGUF header lacks {error}") from error


def _config(file: GGUFFile) -> dict[str, Any]:
    meta = file.metadata
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    head_dim = meta.get("llama.attention.key_length", hidden // heads)
    if meta.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{file.path.name}: RoPE over a part of the head is not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": meta.get("llama.rope.freq_base", 10000.0)},
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }


def eos_ids(file: GGUFFile) -> frozenset[int]:
    """Token ids that end a generation: end of sequence, of turn and of message, as far as the file names them."""
    names = ("eos", "eot", "eom")
    ids = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return frozenset(token for token in ids if token is not None)


def weights(file: GGUFFile) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield every weight as ``(transformers' name, float32 array)``, one at a time, dequantised when it is asked for.

    Tied output embeddings are not repeated. Raises ``ModelError`` for a tensor of unknown name.
    """
    config = hf_config(file)
    for name in file.tensors:
        target, part = _hf_name(name, file)
        array = file.tensor(name)
        if part in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            array = unpermute(array, heads)
        yield target, array


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of the rows of a q or k projection, ``[heads * head_dim, …]``: a new array.

    llama.cpp rotates neighbouring rows (2i, 2i+1) where transformers rotates halves (i, i + head_dim/2), so its
    converter interleaves the halves of every head.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _hf_name(name: str, file: GGUFFile) -> tuple[str, str]:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name], ""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}", parts[2]
    raise ModelError(f"{file.path.name}: tensor {name!r} belongs to no part of a llama model known here")
