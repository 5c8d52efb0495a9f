"""Tiny models with random weights, as folders that an engine loads in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

VOCAB = 64


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one shape, ``old`` and ``new``."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.5, "eos_token_id": None,
        "tie_word_embeddings": True,
    }  # fmt: skip
    folders = {}
    with torch.random.fork_rng():
        for seed, name in enumerate(("old", "new")):
            torch.manual_seed(seed)
            folders[name] = tmp_path_factory.mktemp(name)
            LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).save_pretrained(folders[name])
            words = {str(number): number for number in range(VOCAB)}
            Tokenizer(models.WordLevel(words)).save(str(folders[name] / "tokenizer.json"))
    return folders


@pytest.fixture(scope="session")
def weights(tiny: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Their weights, as a trainer has them."""
    from transformers import LlamaForCausalLM

    return {name: LlamaForCausalLM.from_pretrained(folder).state_dict() for name, folder in tiny.items()}
