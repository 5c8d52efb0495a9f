"""Steps launched ahead, with tokens resolved on the device, and decode graphs: on the CPU, the same code.

The device is the CPU and a graph is the same work called again; everything around them (staging, padding, the choice of
a graph, static buffers, who waits for what) is what runs on a GPU.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine.core.errors import ConfigError, ExecutionError
from engine.core.pipeline import Pipeline
from engine.core.plan import Outcome, Plan
from engine.core.sampling import SamplingParams
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.executors import _device, _launch, _placement, _runner
from engine.plugins.executors._graphs import DecodeGraphs
from engine.plugins.executors._model import LoadedModel, load_model
from engine.plugins.executors._paged import PagedLayers, active
from engine.plugins.executors._replay import EagerCapture, Waits, Watch
from engine.plugins.executors._sampling_draw import can_ahead, draw_ahead
from engine.plugins.executors._staging import Staging
from engine.plugins.executors.torch import TorchExecutor
from engine.testing import ExecutorSuite, ScriptedExecutor, make_core

CPU = torch.device("cpu")
PROMPTS = (
    (5, 9, 2, 7, 1, 8),
    (40,),
    (3, 1, 4, 1, 5, 9, 2, 6, 8, 3, 3),
    (5, 9, 2, 7, 7),
    (11, 12),
    (5, 9, 2, 7, 1, 8, 4),
)
WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0, "logit_bias": {17: 50.0}, "min_tokens": 4},
    {"temperature": 1.2, "seed": 3, "top_p": 0.9, "presence_penalty": 0.5},
)


class Replayable(TorchAttention):
    """The reference, called again by whatever stands for a graph."""

    name = "replayable"
    provides = TorchAttention.provides | {"attention:graphs"}

    def plan_graph(self, batch: Any) -> None:
        self.plan_batch(batch)


def executor_of(model: Path, *, attention: Any = None, **options: Any) -> TorchExecutor:
    executor = TorchExecutor(TorchExecutor.Options(device="cpu", **options))
    executor.use(model=str(model), attention=attention or Replayable(), seed=0)
    return executor


def said(
    executor: TorchExecutor, wishes: Sequence[dict[str, Any]] = ({"temperature": 0},), **settings: Any
) -> list[Any]:
    """Tokens and log-probabilities of all prompts, which arrive two at a time."""
    core = make_core(executor=executor, **{"num_pages": 24, "max_batch_tokens": 10, "max_model_len": 60, **settings})
    try:
        requests, deltas = [], []
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=9, ignore_eos=True, **wishes[number % len(wishes)])
            requests.append(core.add(list(prompt), params))
            if number % 2:
                deltas += [delta for _ in range(3) for delta in core.step()]
        while core.has_work:
            deltas += core.step()
        assert not core.counters.failed_steps
        reports = [
            (delta.request_id, one.token, round(one.logprob, 3))
            for delta in deltas
            for one in (*delta.prompt_logprobs, *delta.logprobs)
        ]
        return [[request.output for request in requests], sorted(reports)]
    finally:
        core.close()


GRAPHS = {"graphs": "on", "graph_sizes": (1, 2, 4)}


@pytest.mark.parametrize("options", [{}, GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("scheduler", ["unified", "radix"])
def test_what_is_launched_ahead_says_the_same(
    tiny: Callable[..., Path], scheduler: str, overlap: bool, options: dict[str, Any]
) -> None:
    """In both loops, with prompts in chunks, preemption and shared prefixes; whatever the requests ask for."""
    model = tiny()
    for wishes in (WISHES[:1], WISHES):
        for pages in (24, 9):
            settings = {"scheduler": scheduler, "num_pages": pages, "max_running": 6}
            plain = said(executor_of(model), wishes, **settings)
            ahead = said(executor_of(model, ahead=True, **options), wishes, overlap=overlap, **settings)
            assert ahead == plain


class TestAhead(ExecutorSuite):
    """The rules of every executor."""

    plugin = "torch"
    options = {"device": "cpu", "ahead": True, **GRAPHS}

    @pytest.fixture(autouse=True)
    def _small(self, tiny: Callable[..., Path]) -> None:
        type(self).use = {"model": str(tiny()), "attention": Replayable()}


class Counting:
    """Who waited for which fence, and when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        waits = self

        class Counted(_device.Fence):
            def wait(self) -> None:
                waits.count += 1
                super().wait()

        monkeypatch.setattr(_launch, "Fence", Counted)


def decoding(driver: Any, executor: TorchExecutor, **params: Any) -> tuple[Any, list[Any]]:
    """Three requests whose prompts are computed."""
    run = driver(executor, 64, 4)
    requests = [run.request(prompt, **params) for prompt in PROMPTS[:3]]
    run.step([(request, request.debt) for request in requests])
    return run, requests


def ahead_of(run: Any, requests: Sequence[Any], awaits: Sequence[int]) -> Plan:
    """The step after the one that is in flight: one more token each, known to nobody yet."""
    for request in requests:
        request.computed += 1
    plan = run.plan([(request, 1) for request in requests])
    for request in requests:
        request.computed -= 1
    return replace(plan, awaits=tuple(awaits), samples=(True,) * len(requests))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2)], ids=["same", "others", "fewer"])
@pytest.mark.parametrize("options", [{}, GRAPHS], ids=["eager", "graphs"])
def test_nobody_waits_for_greedy_tokens_before_they_are_asked_for(
    tiny: Callable[..., Path], make_executor: Any, driver: Any, monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any], order: tuple[int, ...],
) -> None:  # fmt: skip
    """Two steps in flight, the second going on from tokens of the first, in another order or not all of them."""
    waits = Counting(monkeypatch)
    alone = make_executor(tiny())
    run, requests = decoding(driver, alone)
    expected = [run.step([(request, 1) for request in requests]).tokens]
    expected.append(run.step([(requests[row], 1) for row in order]).tokens)

    executor = make_executor(tiny(), attention=Replayable(), ahead=True, **options)
    started(executor)
    run, requests = decoding(driver, executor)
    waits.count = 0
    first = executor.launch(run.plan([(request, 1) for request in requests]))
    second = executor.launch(ahead_of(run, [requests[row] for row in order], order))
    assert waits.count == 0
    assert [first().tokens, second().tokens] == expected
    assert waits.count == 2
    assert first().tokens == expected[0], "what came of a step stays, though others were launched since"


def test_penalties_wait_for_the_tokens_that_they_count(
    tiny: Callable[..., Path], make_executor: Any, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = Counting(monkeypatch)
    executor = make_executor(tiny(), ahead=True)
    run, requests = decoding(driver, executor)
    penalised = run.request(PROMPTS[3], repetition_penalty=1.3)
    run.step([(penalised, penalised.debt)])
    both = [requests[0], penalised]
    waits.count = 0
    first = executor.launch(
        run.plan([(request, 1) for request in both])
    )  # one of them is chosen with care: it is known
    executor.launch(ahead_of(run, both, (0, 1)))
    assert waits.count == 0
    assert len(first().tokens) == 2


def started(executor: TorchExecutor, max_running: int = 4) -> None:
    """As the core does, which is not there."""
    executor.start(SimpleNamespace(limits=SimpleNamespace(max_running=max_running)))  # type: ignore[arg-type]


UNSEEN: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "seed": 1, "top_k": 5},
    {"temperature": 1.3, "seed": 2, "min_p": 0.05},
    {"temperature": 0.9, "seed": 3, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.0, "seed": 4, "min_p": 0.2, "top_k": 64},
)


@pytest.mark.parametrize("options", [{}, GRAPHS], ids=["eager", "graphs"])
def test_what_is_drawn_on_the_device_is_the_same(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """By the same numbers, alone and in any company, in both loops; and nobody waits for it."""
    plain = said(executor_of(tiny()), UNSEEN, max_running=6)
    monkeypatch.setattr(_launch, "Chosen", None)
    for overlap in (False, True):
        assert said(executor_of(tiny(), ahead=True, **options), UNSEEN, overlap=overlap, max_running=6) == plain


def test_drawing_ahead_asks_the_device_for_nothing_and_stays_in_the_vocabulary() -> None:
    """Not even of rows that hold NaN, or nothing but minus infinity: the next step looks their tokens up."""
    staging = Staging(CPU)
    logits = torch.randn(3, 300)
    logits[1] = float("nan")
    logits[2] = float("-inf")
    wishes = [SamplingParams(top_k=4), SamplingParams(), SamplingParams(min_p=0.1), SamplingParams(top_p=0.9)]
    assert [can_ahead(wish, 300) for wish in wishes] == [True, True, True, False]
    for wish in wishes[:3]:
        with staging.step(), torch.inference_mode(), Watch():
            picked = draw_ahead(logits, [0, 1, 2], [wish] * 3, [0.3, 0.999, 0.5], staging.put)
        assert all(0 <= token < 300 for token in picked.tolist())


def test_a_plan_that_goes_on_from_nothing_is_refused(
    tiny: Callable[..., Path], make_executor: Any, driver: Any
) -> None:
    executor = make_executor(tiny(), ahead=True)
    run = driver(executor, 64, 4)
    request = run.request((1, 2, 3))
    with pytest.raises(ExecutionError, match="not computed"):
        executor.launch(ahead_of(run, [request], (0,)))
    request.computed = 3
    with pytest.raises(ExecutionError, match="not known yet"):
        executor.launch(run.plan([(request, 2)]))


# ---- graphs


def test_padding_touches_nothing_but_the_scratch_page(
    tiny: Callable[..., Path], make_executor: Any, driver: Any
) -> None:
    """Whatever lies in memory that no row owns stays as it is, and reaches no answer: there is NaN."""
    plain = make_executor(tiny())
    run, requests = decoding(driver, plain)
    expected = run.step([(request, 1) for request in requests]).tokens

    executor = make_executor(tiny(), attention=Replayable(), ahead=True, **GRAPHS)
    run, requests = decoding(driver, executor)
    started(executor)
    owned = torch.zeros(64 * 4, dtype=torch.bool)
    for request in requests:
        slots = [request.pages[at // 4] * 4 + at % 4 for at in range(request.computed)]
        owned[slots] = True
    plan = run.plan([(request, 1) for request in requests])
    written = [request.pages[request.computed // 4] * 4 + request.computed % 4 for request in requests]
    before = {}
    for layer, pair in executor.kv.items():
        assert pair[0].shape[0] == 65
        for side in pair:
            side.flatten(0, 1)[:-4][~owned] = float("nan")
            side[64] = float("nan")
        before[layer] = [side.clone() for side in pair]
    assert executor.execute(plan).tokens == expected
    may = torch.zeros(65 * 4, dtype=torch.bool)
    may[written] = True
    may[64 * 4] = True  # padding is at position 0 of its page
    for layer, pair in executor.kv.items():
        for side, was in zip(pair, before[layer], strict=True):
            changed = ~((side == was) | (side.isnan() & was.isnan())).flatten(2).all(-1).flatten()
            assert torch.equal(changed, may)


def test_connectors_are_not_shown_the_scratch_page(tiny: Callable[..., Path], make_executor: Any) -> None:
    executor = make_executor(tiny(), attention=Replayable(), ahead=True, graphs="on")
    assert {len(region) for region in executor.kv_layout().regions} == {64}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma", "gpt2", "gpt_neox"])
def test_a_decode_step_of_every_kind_of_model_can_be_captured(tiny: Callable[..., Path], kind: str) -> None:
    """No step of transformers' forward asks the device for a number."""
    model = loaded(tiny(kind))
    backend = Replayable()
    layers = PagedLayers(backend, model.layers, 5, 4, torch.float32)
    with torch.inference_mode(), active(layers):
        graphs = DecodeGraphs(
            sizes=(2, 3), device=CPU, scratch=4, page_size=4, plan=backend.plan_graph, forward=model.run,
            capture=EagerCapture(strict=True),
        )  # fmt: skip
        found = graphs.replay(3, [0, 0], [[0], [1]])
    assert found.logits.shape == (3, model.vocab_size)


def test_a_capture_keeps_no_python_so_graphs_keep_what_they_read(tiny: Callable[..., Path]) -> None:
    """A CUDA graph holds addresses alone: what is not held elsewhere is somebody else's memory at the next step."""
    model, backend, kept = loaded(tiny("llama")), Replayable(), []

    def forward(ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        kept.extend(StorageWeakRef(given.untyped_storage()) for given in (ids, positions, keep))
        return model.run(ids, positions, keep)

    def capture(plan: Callable[[], None], work: Callable[[], Any]) -> Callable[[], Any]:
        plan()
        found = work()
        return lambda: found

    with torch.inference_mode(), active(PagedLayers(backend, model.layers, 5, 4, torch.float32)):
        graphs = DecodeGraphs(
            sizes=(2,), device=CPU, scratch=4, page_size=4, plan=backend.plan_graph, forward=forward, capture=capture
        )
    gc.collect()
    assert graphs.sizes == [2]
    assert len(kept) == 3
    assert not any(storage.expired() for storage in kept), "read by the graph, and kept by nobody"


def test_work_that_waits_for_the_device_is_not_captured(tiny: Callable[..., Path], monkeypatch: Any) -> None:
    """It is found out before a capture is tried: the engine goes on without graphs and says so, or refuses."""
    for wait in (
        lambda: bool(torch.ones(2).all()),
        lambda: torch.ones(2).nonzero(),
        lambda: torch.ones(3)[torch.tensor([True, False, True])],
        lambda: torch.ones(2).to("meta"),
        lambda: torch.ones(2).tolist()[0] and torch.ones(1).item(),
    ):
        with pytest.raises(Waits), Watch():
            wait()
    with Watch(), torch.inference_mode():
        assert torch.ones(3)[torch.tensor([0, 2])].to(torch.float64).to("cpu").shape == (2,)

    plain = said(executor_of(tiny()))
    forward = LoadedModel.run

    def waiting(self: LoadedModel, ids: Any, positions: Any, keep: Any) -> Any:
        return forward(self, ids, positions, keep) * int(positions.max() >= 0)

    monkeypatch.setattr(LoadedModel, "run", waiting)
    monkeypatch.setattr(_runner, "EagerCapture", lambda: EagerCapture(strict=True))
    with pytest.raises(ConfigError, match="no graphs of this model: it waits for the device.*item"):
        said(executor_of(tiny(), ahead=True, graphs="on"))
    monkeypatch.setattr(_placement, "_no_graphs", lambda place, options, attention: "")
    assert said(executor_of(tiny(), ahead=True)) == plain


def loaded(path: Path) -> LoadedModel:
    from engine.core.models.source import resolve

    return load_model(resolve(str(path)), torch.float32)


def test_new_weights_are_what_graphs_compute(tiny: Callable[..., Path], make_executor: Any) -> None:
    one, other = tiny("qwen2", 0), tiny("qwen2", 1)
    expected = said(executor_of(other))
    executor = executor_of(one, ahead=True, **GRAPHS)
    core = make_core(executor=executor, num_pages=24, max_model_len=60, overlap=True)
    fingerprint = core.update_weights(str(other)).fingerprint
    requests = [core.add(list(p), SamplingParams(max_tokens=9, ignore_eos=True, temperature=0)) for p in PROMPTS]
    while core.has_work:
        core.step()
    assert [request.output for request in requests] == expected[0]
    assert fingerprint.endswith(":float32")
    core.close()


def test_graphs_are_made_for_those_that_may_run(tiny: Callable[..., Path], make_executor: Any) -> None:
    """No larger than what ``max_running`` rows need; a plan takes the smallest that holds it."""
    executor = make_executor(tiny(), attention=Replayable(), ahead=True, graphs="on", graph_sizes=(8, 1, 4, 2, 16))
    started(executor, max_running=3)
    graphs = executor._runner._launcher.graphs
    assert graphs.sizes == [1, 2, 4]

    def fitting(rows: int, tokens: int = 1, samples: bool = True) -> int | None:
        counts = (tokens,) + (1,) * (rows - 1)
        plan = Plan(
            index=0, requests=(None,) * rows, epochs=(), starts=(), counts=counts, samples=(samples,) * rows, tables=()
        )  # type: ignore[arg-type]
        return graphs.fitting(plan)

    assert [fitting(rows) for rows in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]
    assert fitting(2, tokens=2) is None
    assert fitting(2, samples=False) is None


class Eighths(TorchAttention):
    """The reference over pages of fp8, which it reads as numbers of the queries' type."""

    name = "eighths"
    provides = TorchAttention.provides | {"attention:fp8-kv"}

    def write(self, keys: Any, values: Any, k_pages: Any, v_pages: Any) -> None:
        raw = [side.view(torch.uint8) for side in (k_pages, v_pages)]
        super().write(*(side.to(k_pages.dtype).view(torch.uint8) for side in (keys, values)), *raw)

    def attend(self, query: Any, k_pages: Any, v_pages: Any, scale: float, **features: Any) -> Any:
        return super().attend(query, k_pages.to(query.dtype), v_pages.to(query.dtype), scale, **features)


def test_kv_in_fp8_takes_a_quarter_and_is_named_in_the_fingerprint(tiny: Callable[..., Path]) -> None:
    plain, small = (
        executor_of(tiny(), attention=Eighths(), ahead=True, kv_dtype=kind).load() for kind in ("auto", "fp8")
    )
    assert plain.kv_bytes_per_token == 4 * small.kv_bytes_per_token
    assert small.fingerprint == f"{plain.fingerprint}:kv-fp8"
    assert small.details["kv_dtype"] == "float8_e4m3fn"
    executor = executor_of(tiny(), attention=Eighths(), ahead=True, kv_dtype="fp8")
    outputs, _ = said(executor_of(tiny(), attention=Eighths(), kv_dtype="fp8"))
    assert said(executor, overlap=True)[0] == outputs
    assert outputs != said(executor_of(tiny()))[0], "it is not float32 in disguise"


# ---- what fails


def test_a_poisoned_row_fails_alone_and_takes_nobody_along(tiny: Callable[..., Path]) -> None:
    """Its next row was launched already: it is dropped, and all others say what they say without it."""
    model = tiny()
    plain = said(executor_of(model), overlap=True)[0]
    executor = executor_of(model, ahead=True, **GRAPHS)
    core = make_core(executor=executor, num_pages=24, max_batch_tokens=64, max_model_len=60, overlap=True)
    requests = [core.add(list(p), SamplingParams(max_tokens=9, ignore_eos=True, temperature=0)) for p in PROMPTS[:3]]
    for _ in range(4):
        core.step()
    executor.kv[1][1][requests[1].pages[0]] = float("nan")
    while core.has_work:
        core.step()
    assert requests[1].finish == "error"
    assert "NaN" in requests[1].detail
    assert [requests[row].output for row in (0, 2)] == [plain[0], plain[2]]
    core.close()


class Answering(ScriptedExecutor):
    """Launches at once, and answers when it is asked: sometimes with an error."""

    def __init__(self, failing: set[int]) -> None:
        super().__init__()
        self.failing, self.asked = failing, []

    def launch(self, plan: Plan) -> Callable[[], Outcome]:
        outcome = self.execute(plan)

        def answer() -> Outcome:
            self.asked.append(plan.index)
            if plan.index in self.failing:
                raise RuntimeError(f"step {plan.index} is lost")
            return outcome

        return answer


@pytest.mark.parametrize("background", [False, True])
def test_answers_are_waited_for_in_order_and_those_of_abandoned_steps_too(background: bool) -> None:
    executor = Answering({1, 2})
    core = make_core(executor=executor, overlap=True)
    core.add([1, 2, 3], SamplingParams(max_tokens=5))
    pipeline = Pipeline(executor, background=background)
    plans = [core.plan(), core.plan()]
    for plan in plans:
        pipeline.launch(plan)
    with pytest.raises(RuntimeError, match="step 1 is lost"):
        pipeline.collect()
    assert executor.asked == [1]
    pipeline.abandon()
    assert executor.asked == [1, 2], "nobody may still be at work when the executor is used again"
    pipeline.close()
    core.close()


def test_a_step_that_is_lost_after_it_was_launched_fails_its_requests(tiny: Callable[..., Path]) -> None:
    executor = Answering({3})
    core = make_core(executor=executor, overlap=True)
    request = core.add([1, 2, 3], SamplingParams(max_tokens=5))
    while core.has_work:
        core.step()
    assert (request.finish, core.counters.failed_steps) == ("error", 1)
    assert "step 3 is lost" in request.detail
    again = core.add([1, 2, 3], SamplingParams(max_tokens=5))
    while core.has_work:
        core.step()
    assert again.num_output == 5
    core.close()


# ---- staging


def test_a_buffer_is_used_again_only_when_its_copies_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is too small grows without touching what is being copied."""
    staging = Staging(CPU, depth=2)
    events: list[tuple[str, int]] = []
    for number, buffer in enumerate(staging._buffers):
        monkeypatch.setattr(buffer.fence, "mark", lambda number=number: events.append(("mark", number)))
        monkeypatch.setattr(buffer.fence, "wait", lambda number=number: events.append(("wait", number)))
    for step in range(3):
        with staging.step():
            numbers = staging.put(range(step, step + 30_000), torch.int32)
            pair = staging.put([[1, step], [3, 4]], torch.long)
            static = torch.zeros(4, dtype=torch.long)
            assert staging.put([step], torch.long, static[:1]).data_ptr() == static.data_ptr()
        assert (numbers[0].item(), numbers[-1].item(), pair.tolist()) == (step, step + 29_999, [[1, step], [3, 4]])
        assert static.tolist() == [step, 0, 0, 0]
    assert events == [(what, number) for number in (1, 0, 1) for what in ("wait", "mark")]


def test_pieces_of_one_step_do_not_overlap() -> None:
    staging = Staging(CPU)
    with staging.step():
        buffer = staging._buffers[staging._turn]
        spans = [(piece.data_ptr(), piece.numel()) for piece in (buffer.take(n) for n in (3, 64, 100_000, 1, 70_000))]
    spans.sort()
    assert all(first + size <= second for (first, size), (second, _) in itertools.pairwise(spans))


# ---- where it computes


@contextmanager
def pretending(monkeypatch: pytest.MonkeyPatch, devices: int, cuda: str | None) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        patch.setattr(torch.cuda, "device_count", lambda: devices)
        patch.setattr(torch.version, "cuda", cuda)
        yield


def test_a_device_that_is_not_there_is_refused_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretending(monkeypatch, 0, None):
        assert _device.device_of("auto") == _device.device_of("cpu") == CPU
        with pytest.raises(ConfigError, match="no device 'cuda': torch .* has no CUDA; use cpu"):
            _device.device_of("cuda")
    with pretending(monkeypatch, 0, "13.0"), pytest.raises(ConfigError, match=r"has CUDA 13.0 and finds no device"):
        _device.device_of("cuda:0")
    with pretending(monkeypatch, 2, "13.0"):
        assert _device.device_of("auto") == _device.device_of("cuda") == torch.device("cuda", 0)
        assert _device.device_of("cuda:1") == torch.device("cuda", 1)
        with pytest.raises(ConfigError, match="no device 'cuda:2': this machine has 2, cuda:0 to cuda:1"):
            _device.device_of("cuda:2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_dtype": "fp8"}, "KV of fp8 is asked for, which attention torch does not read: --attention .* or leave"),
        ({"graphs": "on", "ahead": True}, "no graphs: attention 'torch' cannot be captured"),
        ({"graphs": "on"}, "not launched ahead"),
        ({"memory_part": 0.5}, "memory_part is for CUDA"),
        ({"weights": "int8", "dtype": "bfloat16"}, "need the compiled kernels"),
    ],
)
def test_what_does_not_fit_together_is_refused(tiny: Callable[..., Path], options: dict[str, Any], words: str) -> None:
    executor = executor_of(tiny(), attention=TorchAttention(), **options)
    with pytest.raises(ConfigError, match=words):
        executor.load()


def test_what_was_chosen_is_told(tiny: Callable[..., Path]) -> None:
    executor = executor_of(tiny())
    plain = executor.load().details
    assert executor.default_batch_tokens() == 512
    executor._runner._place = executor._runner._place._replace(device=ELSEWHERE)
    assert executor.default_batch_tokens() is None, "what is slow on a CPU is not slow elsewhere"
    assert (plain["device"], plain["kv_dtype"], plain["graphs"]) == ("cpu", "float32", "none: device cpu has none")
    assert executor_of(tiny(), ahead=True, graphs="on").load().details["graphs"] == "of decode steps"


class Nowhere(TorchAttention):
    """Computes nothing, where it is asked to."""

    def plan_batch(self, batch: Any) -> None:
        assert batch.device == ELSEWHERE

    plan_graph = plan_batch

    def write(self, keys: Any, values: Any, k_pages: Any, v_pages: Any) -> None:
        assert keys.device == values.device == k_pages.device == v_pages.device == ELSEWHERE

    def attend(self, query: Any, k_pages: Any, v_pages: Any, scale: float, **features: Any) -> Any:
        return query * scale


ELSEWHERE = torch.device("meta")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_everything_that_a_step_computes_with_is_on_its_device(
    driver: Any, tiny: Callable[..., Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that has no content: whatever would be computed with tensors of two devices is an error there."""
    import numpy as np
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.plugins.executors._paged import IMPLEMENTATION, register
    from engine.plugins.executors._sampling import Sampler

    class There(Staging):
        def put(self, values: Any, dtype: torch.dtype, into: Any = None) -> Any:
            return torch.empty(np.shape(values), dtype=dtype, device=ELSEWHERE) if into is None else into

    class Kept(_launch.Launched):
        def __init__(self, plan: Plan, sampling: Sequence[int], tokens: Any, best: Any) -> None:
            assert tokens.device == best.device == ELSEWHERE
            super().__init__(plan, sampling, tokens)

        def outcome(self) -> Outcome:
            raise AssertionError("there is no content to look at")

    monkeypatch.setattr(_launch, "Staging", There)
    monkeypatch.setattr(_launch, "Coming", Kept)
    register()
    config = AutoConfig.from_pretrained(tiny(kind))
    with ELSEWHERE, torch.no_grad():
        module = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION)
    model, backend = LoadedModel(module.eval(), frozenset(), ""), Nowhere()
    layers = PagedLayers(backend, model.layers, 65, 4, torch.float32, ELSEWHERE)
    with active(layers), torch.inference_mode():
        graphs = DecodeGraphs(
            sizes=(2, 4), device=ELSEWHERE, scratch=64, page_size=4, plan=backend.plan_graph, forward=model.run,
            capture=EagerCapture(),
        )  # fmt: skip
    launcher = _launch.Launcher(
        device=ELSEWHERE, attention=backend, forward=model.run, layers=layers, sampler=Sampler(0), page_size=4
    )  # fmt: skip
    launcher.graphs = graphs
    run = driver(None, 64, 4)
    requests = [run.request(prompt) for prompt in PROMPTS[:3]]
    launcher.launch(run.plan([(request, request.debt) for request in requests]))
    for request in requests:
        request.computed = request.num_prompt - 1
    for some in (requests, requests[::-1], requests[:1]):  # by graph: from others' rows, and from its own
        launcher.launch(ahead_of(run, some, [requests.index(request) for request in some]))
    mixed = run.request((7, 7, 7))
    launcher.launch(replace(run.plan([(requests[0], 1), (mixed, 3)]), awaits=(0, -1)))
    launcher.launch(run.plan([(run.request((7, 7, 7)), 2)]))


TRITON = """
import sys
from engine.core.registry import make
from engine.core.sampling import SamplingParams
from engine.plugins.executors.torch import TorchExecutor
from engine.testing import make_core

def said(attention, overlap, **options):
    executor = TorchExecutor(TorchExecutor.Options(device="cpu", compiled=False, **options))
    executor.use(model=sys.argv[1], attention=make("attention", attention), seed=0)
    core = make_core(executor=executor, num_pages=24, max_batch_tokens=10, max_model_len=40, overlap=overlap)
    prompts = ([5, 9, 2, 7, 1, 8], [40], [3, 1, 4, 1, 5, 9, 2])
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    requests = [core.add(prompt, params) for prompt in prompts]
    while core.has_work:
        core.step()
    core.close()
    return [request.output for request in requests]

graphs = {"ahead": True, "graphs": "on", "graph_sizes": (2, 4)}
for kv in ("auto", "fp8"):
    plain, replayed = (said("triton", overlap, kv_dtype=kv, **more) for overlap, more in ((False, {}), (True, graphs)))
    assert plain == replayed, (kv, plain, replayed)
    assert kv == "fp8" or plain == said("torch", False), plain
"""


def test_graphs_of_triton_kernels_say_the_same(tiny: Callable[..., Path]) -> None:
    """Its static index tensors, written anew at each step, in Triton's interpreter; with KV of its own type and fp8."""
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, "-c", TRITON, str(tiny())]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
