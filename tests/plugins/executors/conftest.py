"""Fixtures of the model runner's tests: plans built by hand, and tiny models with random weights on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ModelError
from engine.core.models.source import resolve
from engine.core.plan import Outcome, Plan
from engine.core.request import Request, SamplingParams
from engine.plugins.attention.auto import AutoAttention
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.executors.torch import TorchExecutor


class Driver:
    """Stands in for the core: a trivial page table, plans by hand, tokens appended."""

    def __init__(self, executor: TorchExecutor, num_pages: int, page_size: int) -> None:
        self.executor = executor
        self.page_size = page_size
        self.free = list(range(num_pages))
        self.arrivals = 0

    def request(self, prompt: Sequence[int], **params: Any) -> Request:
        self.arrivals += 1
        params = {"temperature": 0.0, **params}
        return Request(
            id=f"r{self.arrivals}",
            tokens=list(prompt),
            num_prompt=len(prompt),
            params=SamplingParams(**params),
            max_total=10**6,
            arrival_index=self.arrivals,
        )

    def plan(self, rows: Sequence[tuple[Request, int]]) -> Plan:
        """A step where each request computes so many tokens. Takes pages, every other one from the far end."""
        for request, count in rows:
            while len(request.pages) * self.page_size < request.computed + count:
                request.pages.append(self.free.pop(0 if len(self.free) % 2 else -1))
        return Plan(
            index=1,
            requests=tuple(request for request, _ in rows),
            epochs=tuple(request.epoch for request, _ in rows),
            starts=tuple(request.computed for request, _ in rows),
            counts=tuple(count for _, count in rows),
            samples=tuple(request.computed + count == request.num_tokens for request, count in rows),
            tables=tuple(request.pages for request, _ in rows),
        )

    def step(self, rows: Sequence[tuple[Request, int]]) -> Outcome:
        outcome = self.executor.execute(self.plan(rows))
        for (request, count), tokens in zip(rows, outcome.tokens, strict=True):
            request.computed += count
            request.planned = request.computed
            request.tokens.extend(tokens)
        return outcome

    def finish(self, requests: Sequence[Request], upto: int, chunk: int = 10**6) -> list[list[int]]:
        """Run all requests together until each has ``upto`` output tokens, then give their pages back."""
        while alive := [request for request in requests if request.num_output < upto]:
            self.step([(request, min(chunk, request.debt)) for request in alive])
        for request in requests:
            self.free += request.pages
        return [request.output for request in requests]


MakeExecutor = Callable[..., TorchExecutor]


@pytest.fixture
def make_executor() -> Iterator[MakeExecutor]:
    """Build, load and allocate executors; they are closed at the end of the test."""
    made: list[TorchExecutor] = []

    def make(
        model: str | Path, *, num_pages: int = 64, page_size: int = 4, seed: int = 0, attention: Any = None,
        **options: Any,
    ) -> TorchExecutor:  # fmt: skip
        executor = TorchExecutor(TorchExecutor.Options(**options))
        made.append(executor)
        executor.use(model=str(model), attention=attention or TorchAttention(), seed=seed)
        executor.load()
        executor.allocate(num_pages, page_size)
        return executor

    yield make
    for executor in made:
        executor.close()


@pytest.fixture(scope="session")
def smollm() -> Iterator[TorchExecutor]:
    """The default model, with 256 pages of 16, on the backend that it has by default."""
    try:
        resolve("default")
    except ModelError as error:
        pytest.skip(str(error))
    executor = TorchExecutor()
    executor.use(model="default", attention=AutoAttention(), seed=0)
    executor.load()
    executor.allocate(256, 16)
    yield executor
    executor.close()


TINY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
    "gpt2": {"n_embd": 32, "n_head": 4},
    "gpt_neox": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model of two layers with random weights, saved as transformers saves it; built once for each kind."""
    known: dict[str, Path] = {}

    def build(kind: str = "llama", seed: int = 0, **changes: Any) -> Path:
        key = json.dumps([kind, seed, changes], sort_keys=True)
        if key not in known:
            known[key] = tmp_path_factory.mktemp(kind)
            save_tiny(known[key], kind, seed, changes)
        return known[key]

    return build


def save_tiny(path: Path, kind: str, seed: int, changes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 300, "num_hidden_layers": 2, "max_position_embeddings": 128, "initializer_range": 0.5}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = AutoConfig.for_model(kind, **{**sizes, **ends, **TINY.get(kind, {}), **changes})
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


@pytest.fixture
def generate(reference: Any) -> Callable[[Path, Sequence[list[int]], int], list[list[int]]]:
    """Greedy tokens by transformers' own ``generate`` of a saved model, one prompt at a time."""

    def run(path: Path, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        import torch
        from transformers import AutoModelForCausalLM

        model = reference(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        return [model.greedy(prompt, count) for prompt in prompts]

    return run


@pytest.fixture
def driver() -> type[Driver]:
    return Driver
