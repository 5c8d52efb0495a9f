"""Models of other families, tiny and random, from directories: any standard decoder runs, anything else is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import T5Config

from engine.core.errors import ModelError
from engine.core.models.source import resolve
from engine.core.models.tokenizer import load_tokenizer
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.executors.torch import TorchExecutor

Tiny = Callable[..., Path]
HEADS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
PROMPTS = ([5, 9, 250, 17], [1], list(range(20, 53)))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "gpt2", "gpt_neox"])
def test_families_generate_what_transformers_generates(
    kind: str, tiny: Tiny, make_executor: Any, driver: Any, generate: Any
) -> None:
    path = tiny(kind)
    run = driver(make_executor(path), 64, 4)
    assert run.finish([run.request(prompt) for prompt in PROMPTS], 12, chunk=7) == generate(path, PROMPTS, 12)


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("packed", [True, False])
def test_tied_embeddings_and_biases(
    changes: dict[str, bool], packed: bool, tiny: Tiny, make_executor: Any, driver: Any, generate: Any
) -> None:
    path = tiny("llama", **changes)
    run = driver(make_executor(path, packed=packed), 64, 4)
    assert run.finish([run.request(prompt) for prompt in PROMPTS], 12) == generate(path, PROMPTS, 12)


def test_a_directory_made_by_hand_serves_text(
    tiny: Tiny, tmp_path: Path, make_executor: Any, driver: Any, generate: Any
) -> None:
    source = tiny("llama")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(resolve(str(tmp_path)))
    ids = tokenizer.encode("héllo 42")
    assert len(ids) == 9
    assert tokenizer.decode(ids) == "héllo 42"
    executor = make_executor(tmp_path)
    run = driver(executor, 64, 4)
    assert run.finish([run.request(ids)], 5) == generate(tmp_path, (ids,), 5)


def test_model_info_of_a_directory(tiny: Tiny) -> None:
    infos = []
    for path, dtype in ((tiny("llama"), "float32"), (tiny("llama"), "bfloat16"), (tiny("llama", seed=1), "float32")):
        executor = TorchExecutor(TorchExecutor.Options(dtype=dtype))
        executor.use(model=str(path), attention=TorchAttention(), seed=0)
        infos.append(executor.load())
        executor.close()
    full, half, other = infos
    assert (full.vocab_size, full.max_model_len, full.eos_ids) == (300, 128, {2})
    assert (full.kv_bytes_per_token, half.kv_bytes_per_token) == (2 * 2 * 2 * 8 * 4, 2 * 2 * 2 * 8 * 2)
    assert len({full.fingerprint, half.fingerprint, other.fingerprint}) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(dtype: str, tiny: Tiny, make_executor: Any, driver: Any) -> None:
    run = driver(make_executor(tiny("llama"), dtype=dtype), 64, 4)
    assert run.executor.kv[0][0].dtype == getattr(torch, dtype)
    outputs = run.finish([run.request(prompt) for prompt in PROMPTS], 6)
    assert [len(output) for output in outputs] == [6, 6, 6]


def test_two_engines_in_one_process_do_not_mix(tiny: Tiny, make_executor: Any, driver: Any, generate: Any) -> None:
    paths = [tiny("llama"), tiny("llama", seed=1)]
    alone = [generate(path, PROMPTS, 12) for path in paths]
    assert alone[0] != alone[1]
    runs = [driver(make_executor(path), 64, 4) for path in paths]
    requests = [[run.request(prompt) for prompt in PROMPTS] for run in runs]
    for _ in range(12):  # step by step in turns
        for run, live in zip(runs, requests, strict=True):
            run.step([(request, request.debt) for request in live])
    assert [[request.output for request in live] for live in requests] == alone


def test_two_engines_in_two_threads_do_not_mix(tiny: Tiny, make_executor: Any, driver: Any, generate: Any) -> None:
    paths = [tiny("llama"), tiny("llama", seed=1)]
    alone = [generate(path, PROMPTS, 12) for path in paths]
    runs = [driver(make_executor(path), 64, 4) for path in paths]
    results: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        run = runs[number]
        results[number] = run.finish([run.request(prompt) for prompt in PROMPTS], 12)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[0], results[1]] == alone


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("llama4_text", {"hidden_size": 32, "num_local_experts": 2}, "layers of kind .*chunked_attention"),
        ("gpt_oss", {"hidden_size": 32, "num_local_experts": 2, "layer_types": ["full_attention"] * 2}, "sinks"),
        ("mamba", {"hidden_size": 32, "state_size": 4}, "layers of kind linear_attention"),
        (
            "bloom",
            {"hidden_size": 32, "n_head": 4, "n_layer": 2},
            "0 of 2 layers use transformers' attention interface",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "RoPE of type dynamic",
        ),
    ],
)
def test_other_attention_is_refused_by_name(kind: str, changes: dict[str, Any], words: str, tiny: Tiny) -> None:
    executor = TorchExecutor()
    executor.use(model=str(tiny(kind, **changes)), attention=TorchAttention(), seed=0)
    with pytest.raises(ModelError, match=words):
        executor.load()


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    T5Config(num_layers=1).save_pretrained(tmp_path)
    executor = TorchExecutor()
    executor.use(model=str(tmp_path), attention=TorchAttention(), seed=0)
    with pytest.raises(ModelError, match="t5 is an encoder-decoder"):
        executor.load()


def test_a_directory_without_weights_is_a_model_error(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny("llama") / "config.json").read_bytes())
    executor = TorchExecutor()
    executor.use(model=str(tmp_path), attention=TorchAttention(), seed=0)
    with pytest.raises(ModelError, match="cannot load it"):
        executor.load()


@pytest.mark.parametrize(("own", "expected", "module"), [(None, "PASSIVE", "_runner"), ("ACTIVE", "ACTIVE", "_openmp")])
def test_openmp_threads_are_asked_to_sleep_unless_the_user_decides(own: str | None, expected: str, module: str) -> None:
    """Settings count only before torch is imported, so a fresh process is asked."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if own is not None:
        env["OMP_WAIT_POLICY"] = own
    env["OMP_DISPLAY_ENV"] = "TRUE"  # the library itself says what it read
    code = f"import engine.plugins.executors.{module}, os; print(os.environ.get('OMP_WAIT_POLICY'))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert f"OMP_WAIT_POLICY = '{expected}'" in done.stderr
    assert done.stdout.strip() == str(own)  # the environment is the user's
