"""``engine doctor`` says of each attention backend whether it can compute this model here, and why not."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from engine.cli import doctor_attention
from engine.cli.doctor_attention import backends, layer_of, place
from engine.core import AttentionLayer, EngineConfig
from engine.core.config import Selection

LAYER = AttentionLayer(heads=9, kv_heads=3, k_dim=64, v_dim=64, scale=0.125)


def config(**options: Any) -> EngineConfig:
    return EngineConfig(executor=Selection(name="torch", options=options))


def lines(layer: AttentionLayer | None = LAYER, **options: Any) -> dict[str, str]:
    return {name: f"{status}: {words}" for status, name, words in backends(config(**options), layer)}


def test_each_backend_is_asked_and_says_why_not() -> None:
    found = lines(device="cpu")
    assert {"attention cpu", "attention torch", "attention flashinfer"} <= set(found)
    assert not {"attention auto", "attention split"} & set(found)
    assert found["attention torch"] == "ok: can, float32 on cpu: torch"
    assert found["attention flashinfer"].startswith("absent: cannot: attention flashinfer computes on CUDA devices")
    assert re.match("ok: can, float32 on cpu: cpu|absent: cannot: .*compiler", found["attention cpu"])
    assert "absent: cannot: attention cpu computes float32" in lines(device="cpu", dtype="bfloat16")["attention cpu"]


def test_the_models_layers_are_asked_for() -> None:
    windowed = AttentionLayer(heads=9, kv_heads=3, k_dim=64, v_dim=64, scale=0.125, window=128)
    assert lines(windowed, device="cpu")["attention torch"].startswith("ok")
    told = lines(windowed, device="cpu")["attention cpu"]
    assert told == "absent: cannot: it does not compute what the model has: window" or "compiler" in told


def test_where_the_executor_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(config(device="cuda:1", dtype="float16")) == ("cuda:1", "float16")
    for seen, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(doctor_attention, "_torch_has_cuda", lambda seen=seen: seen)
        assert place(config()) == (device, "float32")


def test_a_layer_is_read_from_a_models_config() -> None:
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "sliding_window": 128}
    assert layer_of(shape, "") == AttentionLayer(heads=8, kv_heads=2, k_dim=64, v_dim=64, scale=0.125, window=128)
    more = {**shape, "head_dim": 256, "use_sliding_window": False, "attn_logit_softcapping": 50.0}
    assert layer_of(more, "float8_e4m3fn") == AttentionLayer(
        heads=8, kv_heads=2, k_dim=256, v_dim=256, scale=0.0625, soft_cap=50.0, kv_dtype="float8_e4m3fn"
    )
    assert layer_of({"num_attention_heads": "many"}, "") is None


def test_nothing_is_imported_to_say_so() -> None:
    code = (
        "import sys; from engine.cli.doctor_attention import backends; from engine.core import EngineConfig; "
        "list(backends(EngineConfig(), None)); print([n for n in ('flashinfer', 'triton') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    import torch

    if not torch.cuda.is_available():
        assert done.stdout.strip() == "[]"
