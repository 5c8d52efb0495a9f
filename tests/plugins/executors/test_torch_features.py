"""Sliding windows and capped scores: transformers' tokens with a backend that can, words with one that cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.core import Attention, AttentionLayer, ConfigError, ModelError
from engine.core.native import why_not
from engine.core.registry import make
from engine.plugins.executors._model import check_windows
from engine.plugins.executors._paged import LayerShape, introduce
from engine.plugins.executors.torch import TorchExecutor

Tiny = Callable[..., Path]
HEADS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPTS = ([5, 9, 250, 17], [1], list(range(20, 53)))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "every layer": ("mistral", {**HEADS, "sliding_window": 6}),
    "some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "window and cap": (
        "gemma2",
        {**HEADS, "head_dim": 8, "sliding_window": 7, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 9.0,
         "query_pre_attn_scalar": 5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", MODELS)
def test_layers_with_features_say_what_transformers_says(
    which: str, tiny: Tiny, make_executor: Any, driver: Any, generate: Any
) -> None:
    kind, changes = MODELS[which]
    path = tiny(kind, **changes)
    run = driver(make_executor(path), 64, 4)
    found = run.finish([run.request(prompt) for prompt in PROMPTS], 12, chunk=9)
    assert found == generate(path, PROMPTS, 12)
    without = {"sliding_window": None} if kind == "mistral" else {"layer_types": ["full_attention"] * 2}
    assert found != generate(tiny(kind, **{**changes, **without}), PROMPTS, 12)  # so it matters


@pytest.mark.parametrize(("which", "words"), [("every layer", "a sliding window"), ("window and cap", "capped scores")])
def test_a_backend_that_cannot_is_refused_with_those_that_can(which: str, words: str, tiny: Tiny) -> None:
    class Plain(Attention):
        """Not more than attention."""

        name = "plain"
        plan_batch = write = attend = None  # type: ignore[assignment]

    kind, changes = MODELS[which]
    executor = TorchExecutor()
    executor.use(model=str(tiny(kind, **changes)), attention=Plain(), seed=0)  # type: ignore[abstract]
    with pytest.raises(ModelError, match=f"have {words}, which attention plain .*: choose .*--attention torch"):
        executor.load()


def test_auto_goes_on_to_one_that_can(tiny: Tiny) -> None:
    kind, changes = MODELS["window and cap"]
    executor = TorchExecutor()
    executor.use(model=str(tiny(kind, **changes)), attention=(backend := make("attention", "auto")), seed=0)
    words = executor.load().details["attention"]
    assert words.startswith("torch; not ")
    assert "attention cpu" in words
    assert "attention:window" in backend.provides
    executor.close()
    alone = make("attention", "auto", {"order": ["cpu"]})
    layer = AttentionLayer(heads=4, kv_heads=2, k_dim=8, v_dim=8, scale=1.0, soft_cap=3.0)
    if why_not() is None:
        alone.prepare(device="cpu", dtype="float32")
        with pytest.raises(ConfigError, match="no attention backend of cpu can: attention cpu does not provide"):
            alone.expect([layer])


def test_a_window_that_the_model_keeps_to_itself_is_refused() -> None:
    """Applied by a mask of the model's own, it would be lost."""

    class Config:
        """Of a model whose attention is not told."""

        model_type = "odd"
        sliding_window = 8
        layer_types = ("sliding_attention", "full_attention")

        def get_text_config(self) -> Config:
            return self

    def layers(*windows: int | None) -> list[LayerShape]:
        return [LayerShape(at, 4, 2, 8, 8, 1.0, window, None) for at, window in enumerate(windows)]

    check_windows(Config(), layers(8, None))
    with pytest.raises(ModelError, match=r"odd: layer 0 \(sliding_attention\) should have a window of 8 .* has None"):
        check_windows(Config(), layers(None, None))
    with pytest.raises(ModelError, match=r"layer 1 \(full_attention\) should have a window of None .* has 8"):
        check_windows(Config(), layers(8, 8))


def test_pages_of_fp8_need_a_backend_for_them() -> None:
    shape = LayerShape(0, 4, 2, 8, 8, 1.0, None, None)
    assert introduce(make("attention", "torch"), [shape], "torch") == "torch"
    with pytest.raises(ConfigError, match="KV of fp8 is asked for, which attention torch does not read: .*triton"):
        introduce(make("attention", "torch"), [shape], "torch", "float8_e4m3fn")
