"""The public face: ``from engine import LLM``."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import engine
from engine import LLM, Completion, ConfigError, EngineConfig, EngineError, InvalidRequest, Pooling, SamplingParams

TEN = SamplingParams(max_tokens=10)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(executor="sim", audit=True) as llm:
        yield llm
        stats = llm.core.stats()
        assert (stats["running"], stats["waiting"], stats["pages_pinned"]) == (0, 0, 0)
        llm.core.check()


def test_every_public_name_is_there() -> None:
    assert {name for name in engine.__all__ if getattr(engine, name, None) is None} == set()
    assert set(engine.__all__) <= set(dir(engine))
    with pytest.raises(AttributeError, match="LLMM"):
        _ = engine.LLMM


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import engine, sys; print([m for m in ('torch', 'transformers', 'pydantic', 'fastapi') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_answers_come_in_the_order_of_prompts(llm: LLM) -> None:
    prompts = [[n, n + 1] for n in range(100)]
    lengths = [SamplingParams(max_tokens=100 - n) for n in range(100)]  # the first ends last
    together = llm.generate(prompts, lengths)
    assert [len(answer.token_ids) for answer in together] == list(range(100, 0, -1))
    assert [llm.generate(prompt, length)[0] for prompt, length in zip(prompts[:5], lengths, strict=False)] == together[
        :5
    ]


def test_choices_of_a_prompt_come_one_after_the_other(llm: LLM) -> None:
    three = SamplingParams(max_tokens=10, n=3, seed=1)
    answers = llm.generate([[1, 2], [3, 4]], [three, TEN])
    assert len({answer.token_ids for answer in answers}) == len(answers) == 4
    assert answers[:3] == llm.generate([1, 2], three)
    assert answers[0].token_ids == llm.generate([1, 2], SamplingParams(max_tokens=10, seed=1))[0].token_ids
    with pytest.raises(InvalidRequest, match="a stream is one choice"):
        llm.stream([1, 2], three)
    with pytest.raises(InvalidRequest, match="n: is 1000, must be between 1 and 128"):
        llm.generate([1, 2], SamplingParams(n=1000))


def test_log_probabilities_come_with_the_answer(llm: LLM) -> None:
    wish = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1)
    [answer] = llm.generate([7, 8, 9], wish)
    assert [one.token for one in answer.logprobs or ()] == list(answer.token_ids)
    assert [one.token for one in answer.prompt_logprobs or ()] == [8, 9]
    assert {len(one.top) for one in answer.logprobs or ()} == {2}
    chunks = list(llm.stream([7, 8, 9], wish))
    assert tuple(one for chunk in chunks for one in chunk.logprobs) == answer.logprobs
    assert [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None] == [answer.prompt_logprobs]
    [plain] = llm.generate([7, 8, 9], TEN)
    assert plain.logprobs is plain.prompt_logprobs is None
    [single] = llm.generate([7], wish)
    assert single.prompt_logprobs == ()


def test_prompts_in_all_shapes(llm: LLM) -> None:
    [text] = llm.generate("hello", TEN)
    assert llm.generate(["hello", [1, 2]], TEN) == [text, *llm.generate([1, 2], TEN)]
    assert llm.generate([], TEN) == []
    assert isinstance(text, Completion)


def test_prompts_as_vectors(llm: LLM) -> None:
    """In their order, each what it is alone; beside streams that are open."""
    stream = llm.stream([1, 2, 3], TEN)
    prompts: list[Any] = ["hello", [7] * 40, [9]]
    together = llm.embed(prompts)
    assert [one.vector.shape for one in together] == [(32,)] * 3
    assert [one.prompt_tokens for one in together][1:] == [40, 1]
    for prompt, one in zip(prompts, together, strict=True):
        [alone] = llm.embed(prompt)
        assert alone.data == one.data
        assert float(np.linalg.norm(alone.vector)) == pytest.approx(1, abs=1e-6)
    assert llm.embed(prompts[1])[0].cached_tokens == 32
    assert llm.embed(prompts[1], Pooling(kind="mean"))[0].cached_tokens == 0
    raw = llm.embed(prompts[1], Pooling(normalize=False))[0].vector
    assert raw / np.linalg.norm(raw) == pytest.approx(together[1].vector, abs=1e-6)
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 1
    assert llm.embed([]) == []
    assert len("".join(chunk.text for chunk in stream)) > 0


@pytest.mark.parametrize(
    ("prompts", "pooling", "words"),
    [
        ([[1], []], None, r"prompts\[1\].*empty"),
        ([[1], [1] * 9000], None, r"prompts\[1\].*9000"),
        ([[1]], Pooling(kind="cls"), "must be one of last, mean"),  # type: ignore[arg-type]
        ([[1]], "mean", "must be Pooling, not str"),
    ],
)
def test_vectors_are_checked_before_any_work(llm: LLM, prompts: Any, pooling: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        llm.embed(prompts, pooling)
    assert llm.core.stats()["accepted"] == 0


def test_a_vector_that_cannot_be_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(plan: Any) -> Any:
        raise RuntimeError("no states today")

    monkeypatch.setattr(llm.core.executor, "execute", fails)
    with pytest.raises(EngineError, match="no states today"):
        llm.embed([[1], [2]])


def test_more_prompts_than_the_queue_holds() -> None:
    with LLM(executor="sim", max_running=2, max_waiting=3) as llm:
        answers = llm.generate([[n] for n in range(50)], TEN)
        assert len({answer.token_ids for answer in answers}) == 50


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([[1], []], TEN, r"prompts\[1\].*empty"),
        ([[1], [1] * 9000], TEN, r"prompts\[1\].*9000"),
        ([[1], [2]], [TEN], "1 sampling params for 2 prompts"),
        ([1, -1], TEN, "vocabulary"),
        ([[1]], SamplingParams(max_tokens=0), "max_tokens"),
        ([[1]], SamplingParams(stop="END"), "stop: must be a tuple of strings"),  # type: ignore[arg-type]
        ([[1]], SamplingParams(max_tokens=5.5), "max_tokens: must be an integer, not float"),  # type: ignore[arg-type]
        ([[1]], [{"max_tokens": 5}], "params: must be SamplingParams, not dict"),
        (np.array([1, 2]), TEN, "must be text or a list, not ndarray"),
        ([np.array([1, 2])], TEN, "list of token ids, not numpy.ndarray"),
        ([[np.int32(1)]], TEN, "integers, not numpy.int32"),
        (5, TEN, "must be text or a list, not int"),
    ],
)
def test_everything_is_checked_before_any_work(llm: LLM, prompts: Any, params: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        llm.generate(prompts, params)
    assert llm.core.stats()["accepted"] == 0


def test_stream_joined_is_the_completion(llm: LLM) -> None:
    chunks = list(llm.stream("hello", TEN))
    [whole] = llm.generate("hello", TEN)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    assert chunks[-1].finish_reason == "length"


def test_stream_refuses_at_once(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.stream([], TEN)


def test_a_stream_left_early_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream([1, 2], SamplingParams(max_tokens=8000))
    next(stream)
    assert llm.core.stats()["running"] == 1
    stream.close()
    assert llm.core.stats()["running"] == 0


@pytest.mark.parametrize("how", ["close", "drop", "with"])
def test_a_stream_left_before_its_first_piece_is_ended(llm: LLM, how: str) -> None:
    stream = llm.stream([1, 2], SamplingParams(max_tokens=8000))
    if how == "close":
        stream.close()
        assert list(stream) == []
        stream.close()
    elif how == "drop":
        del stream
        gc.collect()
    else:
        with stream:
            pass
    llm.generate([3], TEN)
    assert llm.core.stats()["accepted"] == 1  # the other never reached the core


def test_a_stream_that_is_collected_within_a_step_is_ended_after_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [llm.stream([1, 2], SamplingParams(max_tokens=8000))]
    next(streams[0])
    real = llm.core.step

    def step() -> Any:
        streams.clear()
        gc.collect()
        assert llm.core.stats()["running"] == 1
        return real()

    monkeypatch.setattr(llm.core, "step", step)
    llm.step()
    assert llm.core.stats()["running"] == 0


def test_streams_and_batches_interleave(llm: LLM) -> None:
    one, two = llm.stream([1], TEN), llm.stream([2], TEN)
    first = [next(one).token_ids, next(two).token_ids]
    batch = llm.generate([[3], [4]], TEN)
    rest = [sum((chunk.token_ids for chunk in stream), ()) for stream in (one, two)]
    alone = [llm.generate([n], TEN)[0].token_ids for n in (1, 2, 3, 4)]
    assert [first[n] + rest[n] for n in (0, 1)] + [answer.token_ids for answer in batch] == alone


def test_stop_strings(llm: LLM) -> None:
    [plain] = llm.generate([7], SamplingParams(max_tokens=40))
    stop = plain.text[15:18]
    [stopped] = llm.generate([7], SamplingParams(max_tokens=8000, stop=("\x01", stop)))
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert (stopped.finish_reason, stopped.detail) == ("stop", stop)


def test_an_interrupted_batch_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = llm.core.step, []

    def step() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(llm.core, "step", step)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[n] for n in range(5)], SamplingParams(max_tokens=8000))
    assert llm.core.stats()["running"] == 0
    assert llm.generate([1], TEN)[0].finish_reason == "length"


def test_two_engines_in_one_process() -> None:
    with LLM(executor="sim") as one, LLM(executor="sim", scheduler="radix", kvcache="radix") as two:
        streams = [llm.stream([1, 2, 3], TEN) for llm in (one, two)]
        pairs = list(zip(*streams, strict=True))
        assert len(pairs) == 10
        assert all(mine == theirs for mine, theirs in pairs)


def test_close_frees_the_engine_and_is_idempotent() -> None:
    llm = LLM(executor="sim")
    left = llm.stream([1], SamplingParams(max_tokens=8000))
    next(left)
    core = weakref.ref(llm.core)
    llm.close()
    llm.close()
    assert [chunk.finish_reason for chunk in left] == ["abort"]
    del llm, left
    gc.collect()
    assert core() is None


def test_stepping_by_hand(llm: LLM) -> None:
    request = llm.core.add([1, 2, 3], TEN, request_id="mine")
    steps = 0
    while llm.core.has_work:
        llm.core.step()
        steps += 1
    assert (steps, len(request.output), str(request.finish)) == (10, 10, "length")


def test_configuration_and_overrides() -> None:
    base = EngineConfig.model_validate({"executor": {"name": "sim", "vocab_size": 100}, "max_running": 3})
    with LLM(config=base, max_running=5, scheduler={"name": "radix"}) as llm:
        assert llm.core.limits.vocab_size == 100
        assert (llm.core.limits.max_running, llm.config.scheduler.name) == (5, "radix")
    with pytest.raises(ConfigError, match="did you mean 'scheduler'"):
        LLM(shceduler="radix")
    with pytest.raises(ConfigError, match="max_running"):
        LLM(executor="sim", max_running=0)


def test_progress_goes_to_standard_error(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1], [2]], TEN, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "prompts" in captured.err


@pytest.mark.model
def test_default_model() -> None:
    with LLM(num_pages=256) as llm:
        question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
        [answer] = llm.chat(question, SamplingParams(max_tokens=12, temperature=0))
        assert "Paris" in answer.text
        assert answer.finish_reason == "stop"
        chunks = list(llm.stream(llm.render_chat(question), SamplingParams(max_tokens=12, temperature=0)))
        assert "".join(chunk.text for chunk in chunks) == answer.text
        assert chunks[-1].cached_tokens > 0
        llm.core.check()
