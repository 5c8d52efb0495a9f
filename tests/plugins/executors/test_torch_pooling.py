"""Vectors of real models: those that come of transformers' own ``last_hidden_state``, however they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.core import (
    Delta,
    EngineCore,
    Executor,
    Finish,
    ModelInfo,
    Outcome,
    Plan,
    Pooling,
    Request,
    SamplingParams,
)
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.executors import _pooling, _runner
from engine.plugins.executors.torch import TorchExecutor
from engine.testing import make_core

KINDS = ("mean", "last")
PROMPTS = ([5, 9, 2, 7, 1, 8], [40], [3, 1, 4, 1, 5, 9, 2, 6, 8, 3, 3] * 3, [5, 9, 2, 7, 7], list(range(11, 60)))
WAYS: tuple[dict[str, Any], ...] = (
    {"max_batch_tokens": 256},
    {"max_batch_tokens": 8, "page_size": 1, "num_pages": 2048, "kvcache": "radix"},
    {"max_batch_tokens": 9, "overlap": True, "scheduler": "radix", "kvcache": "radix"},
    {"max_batch_tokens": 16, "overlap": True},
)
CLOSE = 2e-5  # largest difference of a number, as a part of the largest one


def by_definition(model: Any, prompt: Sequence[int], kind: str) -> np.ndarray:
    """Pooled from what the base model itself calls its last hidden state."""
    with torch.inference_mode():
        states = model.base_model(torch.tensor([list(prompt)])).last_hidden_state[0].double()
    found: np.ndarray = (states.mean(0) if kind == "mean" else states[-1]).numpy()
    return found


def vectors(core: EngineCore, asked: Sequence[Request], *, preempt: bool = False) -> list[np.ndarray]:
    deltas: list[Delta] = []
    turn = 0
    while core.has_work:
        deltas += core.step()
        turn += 1
        if preempt and turn in (2, 5):
            deltas += core.drain()
            for victim in list(core.running):
                core.give_up(victim, front=True)
    found = {delta.request_id: delta for delta in deltas if delta.finish is not None}
    assert {found[request.id].finish for request in asked} == {Finish.STOP}, deltas
    return [np.frombuffer(found[request.id].vector, "<f4") for request in asked]


def check(executor: Executor, model: Any, prompts: Sequence[list[int]], way: dict[str, Any]) -> None:
    """In company of each other and of one that generates: cold, on a warm cache, preempted in the middle."""
    wanted = [by_definition(model, prompt, kind) for kind in KINDS for prompt in prompts]
    given = {"page_size": 8, "num_pages": 256, "max_running": 8, "max_model_len": 120, **way}
    core = make_core(executor=executor, **given)
    try:
        for turn in ("cold", "warm", "preempted"):
            talk = core.add(prompts[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
            poolings = [Pooling(kind=kind, normalize=False) for kind in KINDS for _ in prompts]
            asked = [core.add(prompt, pooling=one) for prompt, one in zip([*prompts] * 2, poolings, strict=True)]
            found = vectors(core, asked, preempt=turn == "preempted")
            for request, pooling, mine, theirs in zip(asked, poolings, found, wanted, strict=True):
                scale = np.abs(theirs).max()
                np.testing.assert_allclose(mine / scale, theirs / scale, atol=CLOSE, err_msg=f"{request} {turn}")
                if turn == "warm":
                    reads = pooling.kind == "last" and request.num_prompt > given["page_size"]
                    assert bool(request.cached_tokens) == reads, request
            assert len(talk.output) == 12
    finally:
        core.close()


def executor_of(model: Path | str, **options: Any) -> TorchExecutor:
    executor = TorchExecutor(TorchExecutor.Options(device="cpu", **options))
    executor.use(model=str(model), attention=TorchAttention(), seed=0)
    return executor


@pytest.fixture(scope="module")
def plain() -> Callable[[Path], Any]:
    """A saved model as transformers has it."""
    from transformers import AutoModelForCausalLM

    return lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_however_it_is_computed(tiny: Callable[..., Path], plain: Callable[[Path], Any], way: dict[str, Any]) -> None:
    """By the compiled kernels where there are any."""
    check(executor_of(tiny("llama")), plain(tiny("llama")), PROMPTS, way)


@pytest.mark.parametrize("kind", ["qwen2", "gemma", "gpt2", "gpt_neox"])
def test_other_models(tiny: Callable[..., Path], plain: Callable[[Path], Any], kind: str) -> None:
    """In parts, or by transformers' own code: final norms with a bias and without, learned positions."""
    check(executor_of(tiny(kind)), plain(tiny(kind)), PROMPTS, WAYS[3])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_launched_ahead(tiny: Callable[..., Path], plain: Callable[[Path], Any], overlap: bool, compiled: bool) -> None:
    """What a device that works on its own does: sums follow their step to the host."""
    way = {"max_batch_tokens": 9, "overlap": overlap, "scheduler": "radix"}
    check(executor_of(tiny("llama"), ahead=True, compiled=compiled), plain(tiny("llama")), PROMPTS, way)


def test_states_that_are_no_numbers_fail_their_row_alone(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spoilt(_pooling.Sums):
        """The first row's are not."""

        def __init__(self, spans: list[_pooling.Span], states: torch.Tensor) -> None:
            states = states.clone()
            states[spans[0].first, 0] = float("nan")
            super().__init__(spans, states)

    monkeypatch.setattr(_runner, "Sums", Spoilt)
    core = make_core(executor=executor_of(tiny("llama")))
    asked = [core.add(PROMPTS[0], pooling=Pooling(kind="mean")), core.add([40, 41], pooling=Pooling())]
    ends = {delta.request_id: delta for delta in core.step()}
    assert (ends[asked[0].id].finish, ends[asked[0].id].detail) == (Finish.ERROR, _pooling.NAN)
    assert ends[asked[1].id].finish is Finish.STOP
    core.close()


def test_who_needs_no_states_asks_for_none(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a batch without such requests, nor a step of a prompt whose last state is not reached."""
    executor = executor_of(tiny("llama"))
    core = make_core(executor=executor, max_batch_tokens=8)
    assert executor._runner is not None
    model = executor._runner._loaded
    run, asked = model.run_with_states, []

    def watched(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(len(given[3]))
        return run(*given)

    monkeypatch.setattr(model, "run_with_states", watched)
    for wish, states in (({}, []), ({"kind": "last"}, [1]), ({"kind": "mean"}, [8, 8, 4])):
        if wish:
            core.add([7] * 20, pooling=Pooling(**wish))
        else:
            core.add(list(range(20)), SamplingParams(temperature=0, max_tokens=4))
        while core.has_work:
            core.step()
        assert asked == states
        asked.clear()
    core.close()


@pytest.mark.model
def test_the_default_model(smollm: TorchExecutor, reference_model: Any, tokenizer: Any) -> None:
    """Thirty layers deep, in chunks, in company."""
    prompts = [tokenizer.encode(text) for text in ("The capital of France is Paris.", "Hi", "1, 2, 3, 4, 5, 6, 7, 8")]

    class Lent(Executor):
        """The model that others go on with, as its memory is."""

        pooling, overlaps = TorchExecutor.pooling, True

        def load(self) -> ModelInfo:
            assert smollm._runner is not None
            model = smollm._runner._loaded
            return ModelInfo(name="lent", vocab_size=model.vocab_size, max_model_len=120, hidden_size=model.hidden_size)

        def allocate(self, num_pages: int, page_size: int) -> None:
            assert (num_pages, page_size) == (256, 16)

        def execute(self, plan: Plan) -> Outcome:
            return smollm.execute(plan)

    check(Lent(), reference_model.model, prompts, {**WAYS[3], "page_size": 16, "num_pages": 256})
