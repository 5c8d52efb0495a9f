"""Decoders on the compiled kernels: transformers' tokens, the same bits in any company, and a way out without them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.errors import ConfigError
from engine.core.native import NoKernels, why_not
from engine.core.registry import make
from engine.plugins.attention.cpu import CPUAttention
from engine.plugins.executors import _fused, _runner
from engine.plugins.executors._sampling import argmax

Tiny = Callable[..., Path]
PROMPTS = [[5, 9, 2, 7, 1], [40], [3, 1, 4, 1, 5, 9, 2, 6, 8, 11, 12, 13, 14, 15, 16, 17, 18]]
HEADS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}

needs_kernels = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_size": 36, "head_dim": 10}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("mistral", {**HEADS, "sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {**HEADS, "head_dim": 16}),
    ],
)
def test_the_family_says_what_transformers_says(
    kind: str, changes: dict[str, Any], tiny: Tiny, make_executor: Any, driver: Any, generate: Any
) -> None:
    path = tiny(kind, **changes)
    executor = make_executor(path, attention=make("attention", "cpu"))
    assert executor._loaded._model.fused, executor._loaded._model.not_fused
    run = driver(executor, 64, 4)
    assert run.finish([run.request(prompt) for prompt in PROMPTS], 12, chunk=3) == generate(path, PROMPTS, 12)


@needs_kernels
def test_other_models_run_through_transformers_on_the_kernels(
    tiny: Tiny, make_executor: Any, driver: Any, generate: Any
) -> None:
    path = tiny("gemma")
    executor = make_executor(path, attention=make("attention", "cpu"))
    assert executor._loaded._model.fused is None
    assert "GemmaForCausalLM is not of the Llama family" in executor._loaded._kernels
    run = driver(executor, 64, 4)
    assert run.finish([run.request(prompt) for prompt in PROMPTS], 12) == generate(path, PROMPTS, 12)


@needs_kernels
def test_one_that_answers_otherwise_runs_through_transformers(
    tiny: Tiny, make_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E.g. a model that scales something which the fused layers know nothing of."""
    monkeypatch.setattr(_fused, "CLOSE", 0.0)
    executor = make_executor(tiny("llama"))
    assert executor._loaded._model.fused is None
    assert "would differ from transformers'" in executor._loaded._kernels


@needs_kernels
def test_logits_are_the_same_bits_in_any_company(tiny: Tiny, make_executor: Any, driver: Any) -> None:
    """Alone, in a batch, in chunks: not the same tokens only."""
    executor = make_executor(tiny("llama"), attention=make("attention", "cpu"))
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    model = executor._loaded._model
    run_model = model.run

    def watched(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = run_model(ids, positions, keep)
        for row, at in enumerate(keep.tolist()):
            key = (int(ids[at]), int(positions[at]))
            before = seen.setdefault(key, logits[row].clone())
            assert torch.equal(before, logits[row]), key
        return logits

    model.run = watched
    run = driver(executor, 64, 4)
    prompts = [[5, 9, 2, 7, 1], [6, 8, 11, 3], [3, 1, 4, 1, 5, 9, 2, 6, 8, 11, 12, 13]]
    alone = [run.finish([run.request(prompt)], 10)[0] for prompt in prompts]
    seen = {key: value for key, value in seen.items() if sum(key[1] == other[1] for other in seen) == 1}
    for chunk in (10**6, 3, 1):
        assert run.finish([run.request(prompt) for prompt in prompts], 10, chunk=chunk) == alone


@needs_kernels
@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "hidden_size": 36, "head_dim": 10}, HEADS])
def test_all_layers_in_one_call_give_the_same_bits_as_one_by_one(
    changes: dict[str, Any], tiny: Tiny, make_executor: Any, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prefills of which no row, one or all are kept, decodes, and several threads."""
    path = tiny("llama", **changes)
    told: list[list[torch.Tensor]] = []
    for whole in (True, False):
        if not whole:
            monkeypatch.setattr(CPUAttention, "compiled_batch", lambda self: None)
        executor = make_executor(path, attention=make("attention", "cpu"), threads=2)
        fused = executor._loaded._model.fused
        assert fused is not None
        used: list[str] = []
        for name in ("_at_once", "_one_by_one"):
            monkeypatch.setattr(fused, name, watched(used, name, getattr(fused, name)))
        logits: list[torch.Tensor] = []
        monkeypatch.setattr(executor._loaded._model, "run", kept(logits, executor._loaded._model.run))
        run = driver(executor, 64, 4)
        for prompts in (PROMPTS[2:], PROMPTS):
            run.finish([run.request(prompt) for prompt in prompts], 6, chunk=3)
        assert set(used) == {"_at_once" if whole else "_one_by_one"}
        assert {len(rows) for rows in logits} >= {0, 1, len(PROMPTS)}
        told.append([*logits, *(side for pair in executor.kv.values() for side in pair)])
    for ours, theirs in zip(*told, strict=True):
        assert torch.equal(ours, theirs)


def watched(used: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which notes its name."""
    return lambda *arguments: used.append(name) or function(*arguments)


def kept(answers: list[torch.Tensor], function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function, whose answers are kept."""

    def called(*arguments: Any) -> torch.Tensor:
        answers.append(function(*arguments))
        return answers[-1]

    return called


@needs_kernels
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_weights_in_less_are_nearly_those_that_were_given(
    weights: str, tiny: Tiny, make_executor: Any, driver: Any
) -> None:
    path = tiny("qwen2")
    exact, less = (make_executor(path, weights=format) for format in ("float32", weights))
    for name, tensor in exact.weights().items():
        apart = (less.weights()[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-9)
        assert float(apart) < 0.01, name
        if "proj.weight" in name:
            assert float(apart) > 0, name
    before = driver(less, 64, 4)
    said = before.finish([before.request(prompt) for prompt in PROMPTS], 8)
    less.update_weights(less.weights())  # what is stored is stored again
    again = driver(less, 64, 4)
    assert again.finish([again.request(prompt) for prompt in PROMPTS], 8) == said


def test_without_a_compiler_it_goes_on_and_says_so(
    tiny: Tiny, make_executor: Any, driver: Any, generate: Any, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def none() -> None:
        raise NoKernels("no C++ compiler: none is installed")

    monkeypatch.setattr(_runner, "kernels", none)
    with caplog.at_level(logging.WARNING):
        executor = make_executor(tiny("llama"))
    assert "goes on without compiled kernels: no C++ compiler" in caplog.text
    run = driver(executor, 64, 4)
    assert run.finish([run.request(prompt) for prompt in PROMPTS], 8) == generate(tiny("llama"), PROMPTS, 8)
    with pytest.raises(ConfigError, match="weights in int8 need the compiled kernels"):
        make_executor(tiny("llama"), weights="int8")


def test_weights_in_less_need_float32(tiny: Tiny, make_executor: Any) -> None:
    with pytest.raises(ConfigError, match="weights in int8 need the compiled kernels"):
        make_executor(tiny("llama"), weights="int8", dtype="bfloat16")
    with pytest.raises(ConfigError, match="weights in bfloat16 need the compiled kernels"):
        make_executor(tiny("llama"), weights="bfloat16", compiled=False)


@needs_kernels
def test_greedy_rows_are_chosen_alike(make_executor: Any, tiny: Tiny) -> None:
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    logits[2, 5] = torch.nan
    logits[3, 100:200] = 9.0
    mine, theirs = make_executor(tiny("llama"))._loaded._sampler.argmax(logits), argmax(logits)
    assert torch.equal(mine, theirs)
