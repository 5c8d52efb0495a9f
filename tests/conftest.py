"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.core.config import DEFAULT_MODEL

# OpenMP reads this when torch is first imported. Spinning threads keep a core from the servers that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# Of the files that take longest, the longest first. A worker takes whole files, in this order: a long one that is begun
# last keeps it busy when the others have nothing left to do.
LONGEST = (
    "proxy/test_matrix.py",
    "docs/test_tutorials.py",
    "plugins/test_suites.py",
    "test_equivalence.py",
    "cli/test_plugin_commands.py",
    "plugins/frontends/test_openai_lifecycle.py",
    "core/test_machine.py",
    "plugins/connectors/test_handoff_engines.py",
    "plugins/connectors/test_libraries.py",
    "public/test_embedded.py",
    "test_docs.py",
    "plugins/frontends/test_server_life.py",
    "examples/test_plugins.py",
    "plugins/attention/test_triton.py",
    "plugins/executors/test_launch.py",
    "lab/test_bench.py",
    "cli/test_bench.py",
    "plugins/frontends/test_dashboard_browser.py",
    "plugins/frontends/test_dashboard.py",
    "proxy/test_embeddings_engines.py",
    "benchmarks/test_experiments.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others as they were."""
    here = Path(__file__).parent
    place = {here / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The default model's tokenizer."""
    from engine.core.models.source import resolve
    from engine.core.models.tokenizer import load_tokenizer

    return load_tokenizer(resolve(DEFAULT_MODEL))


class Reference:
    """transformers' own model on the same weights, driven by its own ``generate``."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def greedy(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """Greedy continuation; end-of-sequence does not stop it."""
        import torch

        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[0, len(prompt) :].tolist()

    def gap(self, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> float:
        """Difference of the two tokens' logits where the sequences part; infinite if they do not part in a token."""
        import torch

        at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if at is None:
            return float("inf")
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *ours[:at]]])).logits[0, -1]
        return abs(float(logits[ours[at]] - logits[theirs[at]]))


@pytest.fixture(scope="session")
def reference() -> type[Reference]:
    """``reference(model)`` drives any model of transformers."""
    return Reference


@pytest.fixture(scope="session")
def reference_model() -> Reference:
    """The default model as plain transformers, attention and all."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.core.models import gguf_llama
    from engine.core.models.gguf_file import GGUFFile
    from engine.core.models.source import resolve

    with GGUFFile(resolve(DEFAULT_MODEL).path) as file:
        values = {key: value for key, value in gguf_llama.hf_config(file).items() if key != "model_type"}
        model = LlamaForCausalLM(LlamaConfig(**values))
        model.load_state_dict({name: torch.from_numpy(array) for name, array in gguf_llama.weights(file)}, strict=False)
    model.tie_weights()
    return Reference(model.eval())
