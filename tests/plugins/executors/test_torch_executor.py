"""The model runner on the default model: token for token what transformers generates."""

from __future__ import annotations

from typing import Any

import pytest
import transformers.modeling_gguf_pytorch_utils as transformers_gguf

from engine.core.errors import ConfigError, ExecutionError, ModelError
from engine.core.models.source import resolve
from engine.core.models.tokenizer import load_tokenizer
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.executors.torch import TorchExecutor

OUTPUT = 16
PROMPTS = (
    "Hi",
    "def fibonacci(n):\n    ",
    "The capital of France is Paris, and the capital of Italy is",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,",
)

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def prompts(smollm: TorchExecutor) -> list[list[int]]:
    tokenizer = load_tokenizer(resolve("default"))
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(reference_model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' own generate gives, on weights read from the same file."""
    return [reference_model.greedy(prompt, OUTPUT) for prompt in prompts]


def test_one_at_a_time(smollm: TorchExecutor, driver: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    run = driver(smollm, 256, 16)
    assert [run.finish([run.request(prompt)], OUTPUT)[0] for prompt in prompts] == expected


def test_prefill_in_chunks(
    smollm: TorchExecutor, driver: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    run = driver(smollm, 256, 16)
    assert run.finish([run.request(prompt) for prompt in prompts], OUTPUT, chunk=5) == expected


def test_prefill_in_the_middle_of_other_decodes(
    smollm: TorchExecutor, driver: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    run = driver(smollm, 256, 16)
    early, late = [run.request(prompt) for prompt in prompts[2:]], [run.request(prompt) for prompt in prompts[:2]]
    for _ in range(3):
        run.step([(request, request.debt) for request in early])
    assert run.finish([*late, *early], OUTPUT) == expected


def test_pages_of_one_token(
    driver: Any, prompts: list[list[int]], expected: list[list[int]], smollm: TorchExecutor
) -> None:
    """Same memory, other pages: the layout is a matter of the page table only."""
    smollm.allocate(1024, 1)
    try:
        run = driver(smollm, 1024, 1)
        assert run.finish([run.request(prompt) for prompt in prompts], OUTPUT) == expected
    finally:
        smollm.allocate(256, 16)


def test_a_recomputed_request_goes_on_where_it_was(
    smollm: TorchExecutor, driver: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    run = driver(smollm, 256, 16)
    request = run.request(prompts[1])
    for _ in range(6):
        run.step([(request, request.debt)])
    request.computed, request.planned, request.pages = 0, 0, []  # preempted: the output stays, its KV does not
    assert run.finish([request], OUTPUT)[0] == expected[1]


def test_model_info(smollm: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded anew, so that transformers' slow GGUF path can be seen not to be taken."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("transformers' GGUF path was taken")

    monkeypatch.setattr(transformers_gguf, "load_gguf_checkpoint", refuse)
    executor = TorchExecutor(TorchExecutor.Options(packed=False))
    executor.use(model="default", attention=TorchAttention(), seed=0)
    info = executor.load()
    executor.close()
    assert (info.name, info.vocab_size, info.max_model_len) == ("SmolLM2-135M-Instruct", 49152, 8192)
    assert info.eos_ids == {2}
    assert info.kv_bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert info.details["parameters"] == 134_515_008
    assert info.fingerprint.endswith(":float32")


def test_poisoned_memory_fails_its_own_row_alone(smollm: TorchExecutor, driver: Any, prompts: list[list[int]]) -> None:
    run = driver(smollm, 256, 16)
    good, bad, other = (run.request(prompt) for prompt in prompts[1:])
    run.step([(request, request.debt) for request in (good, bad, other)])
    smollm.kv[3][0][bad.pages[0]] = float("nan")
    outcome = run.step([(request, 1) for request in (good, bad, other)])
    smollm.kv[3][0][bad.pages[0]] = 0.0
    assert list(outcome.errors) == [1]
    assert "NaN" in outcome.errors[1]
    assert [len(tokens) for tokens in outcome.tokens] == [1, 0, 1]


def test_rows_that_do_not_sample_yield_nothing(smollm: TorchExecutor, driver: Any, prompts: list[list[int]]) -> None:
    run = driver(smollm, 256, 16)
    chunked, whole = run.request(prompts[3]), run.request(prompts[0])
    outcome = run.step([(chunked, 10), (whole, whole.debt)])
    assert [len(tokens) for tokens in outcome.tokens] == [0, 1]
    assert run.step([(chunked, 10)]).tokens == ((),)


def test_misuse_is_named(smollm: TorchExecutor, driver: Any) -> None:
    with pytest.raises(ConfigError, match="needs a model and an attention backend"):
        TorchExecutor().load()
    run = driver(TorchExecutor(), 4, 4)
    with pytest.raises(ExecutionError, match="load"):
        run.executor.execute(run.plan([(run.request([1, 2]), 2)]))
    executor = TorchExecutor()
    executor.use(model="no-such-model", attention=TorchAttention(), seed=0)
    with pytest.raises(ModelError, match="no-such-model"):
        executor.load()
    run = driver(smollm, 4, 16)
    request = run.request([1, 2])
    request.computed = 1
    with pytest.raises(ExecutionError, match="not known yet"):
        smollm.execute(run.plan([(request, 2)]))
