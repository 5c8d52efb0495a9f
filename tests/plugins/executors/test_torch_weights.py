"""Weights of every kind of model, read and replaced: the same tokens as a model that was loaded with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.plugins.executors.torch import TorchExecutor

PROMPTS = [[5, 9, 2, 7, 1], [40], [3, 1, 4, 1, 5, 9, 2, 6, 8]]


def state_of(folder: Path) -> dict[str, Any]:
    """What a trainer would hand over."""
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "gpt2", "gpt_neox"])
def test_every_kind_of_model(
    tiny: Callable[..., Path], make_executor: Any, driver: Any, kind: str, packed: bool
) -> None:
    """Biases, tied and untied embeddings, norms, convolutions in place of linear layers."""
    one, other = (make_executor(tiny(kind, seed=seed), packed=packed) for seed in (0, 1))

    def tokens(executor: TorchExecutor) -> list[list[int]]:
        run = driver(executor, 64, 4)
        return run.finish([run.request(prompt) for prompt in PROMPTS], 8)  # type: ignore[no-any-return]

    before, expected = tokens(one), tokens(other)
    assert before != expected
    fingerprint = one.update_weights(state_of(tiny(kind, seed=1)))
    assert tokens(one) == expected
    assert other.update_weights(one.weights()) == fingerprint
    assert tokens(other) == expected
    one.update_weights(state_of(tiny(kind, seed=0)))
    assert tokens(one) == before


def test_nothing_is_lost_in_packing(tiny: Callable[..., Path], make_executor: Any) -> None:
    packed, plain = (make_executor(tiny("qwen2"), packed=flag).weights() for flag in (True, False))
    assert packed.keys() == plain.keys()
    assert all(torch.equal(packed[name], plain[name]) for name in packed)
    assert any(name.endswith("q_proj.bias") for name in packed)
