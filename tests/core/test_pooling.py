"""Requests that pool, through the core: the same vector whatever happens to them, and nobody beside them notices."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import (
    POOLING,
    Delta,
    EngineCore,
    Finish,
    InvalidRequest,
    Outcome,
    Plan,
    Pooling,
    Request,
    SamplingParams,
)
from engine.core.record.courses import StepTimes
from engine.core.record.desk import RecordOptions
from engine.core.record.reading import read
from engine.core.registry import make
from engine.core.replay.log import Setup, replay
from engine.core.replay.what_if import simulate
from engine.plugins.executors.sim import SimExecutor
from engine.testing import ScriptedModel, make_core

KVCACHES = ("paged", "radix")
MEAN, LAST = Pooling(kind="mean", normalize=False), Pooling(kind="last", normalize=False)


def sim(cls: type[SimExecutor] = SimExecutor, **options: Any) -> SimExecutor:
    return cls(cls.Options(vocab_size=500, max_model_len=200, hidden_size=8, **options))


def finish(core: EngineCore) -> list[Delta]:
    deltas: list[Delta] = []
    while core.has_work:
        deltas += core.step()
    return deltas


def vector(deltas: list[Delta], request: Request) -> np.ndarray:
    """What one request came to. It is told once, without a token."""
    [mine] = [delta for delta in deltas if delta.request_id == request.id]
    assert (mine.finish, mine.tokens, mine.detail) == (Finish.STOP, (), None), mine
    return np.frombuffer(mine.vector, "<f4")


def expected(prompt: list[int], pooling: Pooling) -> np.ndarray:
    """Of the simulated model, by the definition: one step, one request, its states one by one."""
    core = make_core(executor=sim(), max_batch_tokens=1, num_pages=100)
    try:
        states = []
        for upto in range(1, len(prompt) + 1):
            request = core.add(prompt[:upto], pooling=LAST)
            states.append(vector(finish(core), request).astype(np.float64))
        found = np.mean(states, axis=0) if pooling.kind == "mean" else states[-1]
        return found / np.linalg.norm(found) if pooling.normalize else found
    finally:
        core.close()


PROMPTS = [[7] * 30, [7] * 17 + [3, 1, 4], [9], list(range(20, 45))]
WANTED = {kind: [expected(prompt, Pooling(kind=kind, normalize=False)) for prompt in PROMPTS] for kind in POOLING}


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(POOLING), min_size=4, max_size=4),
    budget=st.integers(6, 40),
    size=st.sampled_from((1, 4)),
    overlap=st.booleans(),
    kvcache=st.sampled_from(KVCACHES),
    scheduler=st.sampled_from(("unified", "radix")),
    pages=st.sampled_from((160, 400)),
    seed=st.integers(0, 2**20),
)
def test_the_vector_is_the_same_whatever_happens(
    kinds: list[str], budget: int, size: int, overlap: bool, kvcache: str, scheduler: str, pages: int, seed: int
) -> None:
    """In chunks of any size, in company, in both loops, short of pages, preempted at any moment, on a warm cache."""
    rng = random.Random(seed)
    core = make_core(
        scheduler=scheduler, kvcache=kvcache, executor=sim(), max_batch_tokens=budget, max_running=6, overlap=overlap,
        page_size=size, num_pages=pages // size // 2,
    )  # fmt: skip
    try:
        core.add([7] * 30, SamplingParams(max_tokens=2))
        finish(core)
        talk = core.add([7] * 25, SamplingParams(max_tokens=20))
        asked = [
            core.add(prompt, pooling=Pooling(kind=kind, normalize=False))  # type: ignore[arg-type]
            for kind, prompt in zip(kinds, PROMPTS, strict=True)
        ]
        deltas: list[Delta] = []
        while core.has_work:
            deltas += core.step()
            if rng.random() < 0.3 and core.running:
                if rng.random() < 0.5:
                    deltas += core.drain()
                for victim in [request for request in core.running if rng.random() < 0.4]:
                    if not core.flight.oldest:
                        core.give_up(victim, front=True)
        for kind, request, wanted in zip(kinds, asked, zip(*WANTED.values(), strict=True), strict=True):
            np.testing.assert_array_equal(
                vector(deltas, request), dict(zip(WANTED, wanted, strict=True))[kind].astype(np.float32)
            )
            assert request.cached_tokens == 0 or kind == "last"
        assert len(talk.output) == 20
        assert core.pool.num_free + core.kv.numbers().evictable == core.pool.num_pages
    finally:
        core.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kvcache", KVCACHES)
def test_the_last_state_reads_the_cache_and_the_mean_does_not(kvcache: str, overlap: bool) -> None:
    """Both leave their KV to others; whoever does not want that says so."""
    core = make_core(executor=sim(), kvcache=kvcache, overlap=overlap)
    prompt = list(range(30))
    cached = []
    for pooling, write in ((MEAN, False), (MEAN, True), (MEAN, True), (LAST, True)):
        request = core.add(prompt, pooling=pooling, write_cache=write)
        finish(core)
        cached.append(request.cached_tokens)
    talk = core.add(prompt, SamplingParams(max_tokens=1))
    finish(core)
    assert [*cached, talk.cached_tokens] == [0, 0, 0, 28, 28]
    core.close()


@pytest.mark.parametrize("scheduler", ["unified", "radix"])
def test_the_company_notices_nothing(scheduler: str) -> None:
    """Tokens, finish reasons and steps of those that generate are what they are without."""
    said = []
    for pools in (False, True):
        core = make_core(executor=sim(), scheduler=scheduler, max_batch_tokens=200, overlap=True, num_pages=200)
        talks = [core.add([n, n + 1], SamplingParams(max_tokens=9, seed=n, logprobs=1)) for n in range(4)]
        if pools:
            core.add(PROMPTS[0], pooling=MEAN)
        deltas = finish(core)
        said.append([[delta for delta in deltas if delta.request_id == talk.id] for talk in talks])
        core.close()
    assert said[0] == said[1]


def test_a_sum_starts_again_after_a_preemption() -> None:
    """What a request had before it gave up its pages is not counted twice."""
    core = make_core(executor=sim(), max_batch_tokens=8)
    request = core.add(PROMPTS[0], pooling=MEAN)
    core.step()
    core.step()
    assert (request.computed, request.pooled is not None) == (16, True)
    core.give_up(request, front=True)
    assert request.pooled is None
    np.testing.assert_array_equal(vector(finish(core), request), WANTED["mean"][0].astype(np.float32))
    core.close()


def test_new_weights_give_another_vector_and_no_mixture() -> None:
    """Whoever is recomputed by other weights has nothing of the old ones in its mean."""
    core = make_core(executor=sim(), max_batch_tokens=8)
    request = core.add(PROMPTS[0], pooling=MEAN)
    core.step()
    core.update_weights({"w": 1}, running="recompute")
    mixed = vector(finish(core), request)
    again = core.add(PROMPTS[0], pooling=MEAN)
    np.testing.assert_array_equal(mixed, vector(finish(core), again))
    assert not np.array_equal(mixed, WANTED["mean"][0].astype(np.float32))
    core.close()


def test_vectors_have_length_one_unless_asked_otherwise() -> None:
    core = make_core(executor=sim())
    for pooling in (Pooling(), Pooling(kind="mean")):
        request = core.add(PROMPTS[3], pooling=pooling)
        found = vector(finish(core), request)
        assert float(np.linalg.norm(found)) == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(found, expected(PROMPTS[3], pooling), atol=1e-6)
    core.close()


def test_a_vector_of_zeros_stays_one() -> None:
    assert np.frombuffer(Pooling().answer(np.zeros(4), 3), "<f4").tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("wish", "field", "words"),
    [
        ({"pooling": "mean"}, "pooling", "must be Pooling, not str"),
        ({"pooling": Pooling(kind="max")}, "pooling", "is 'max', must be one of last, mean"),  # type: ignore[arg-type]
        ({"pooling": Pooling(kind=["mean"])}, "pooling", "must be one of"),  # type: ignore[arg-type]
        ({"pooling": Pooling(normalize=1)}, "normalize", "must be True or False"),  # type: ignore[arg-type]
        ({"pooling": LAST, "params": SamplingParams(max_tokens=3)}, "params", "samples nothing"),
        ({"pooling": LAST, "tokens": []}, "prompt", "is empty"),
        ({"pooling": LAST, "tokens": [1] * 200}, "prompt", "has 200 tokens; at most 199"),
        ({"pooling": LAST, "tokens": [500]}, "prompt", "outside the vocabulary"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wish: dict[str, Any], field: str, words: str) -> None:
    core = make_core(executor=sim(), num_pages=100)
    with pytest.raises(InvalidRequest, match=words) as caught:
        core.add(**{"tokens": [1, 2], **wish})
    assert caught.value.field == field
    assert not core.has_work
    core.close()


class LastOnly(SimExecutor):
    """Cannot sum up."""

    name = "last-only"
    pooling = ("last",)


@pytest.mark.parametrize(
    ("executor", "pooling", "words"),
    [
        (ScriptedModel(), LAST, "embeddings cannot be computed here .nothing of the kind is supported by the executor"),
        (sim(LastOnly), MEAN, "mean: last are supported"),
        (SimExecutor(SimExecutor.Options(hidden_size=0)), LAST, "nothing of the kind"),
    ],
)
def test_what_the_executor_cannot_is_refused(executor: Any, pooling: Pooling, words: str) -> None:
    """One that was written before there were such requests says nothing of them, and is never asked."""
    core = make_core(executor=executor)
    with pytest.raises(InvalidRequest, match=words) as caught:
        core.add([1, 2], pooling=pooling)
    assert (caught.value.field, caught.value.code) == ("pooling", "unsupported")
    core.close()


class Wrong(SimExecutor):
    """Answers something else than was asked for."""

    how = ""

    def execute(self, plan: Plan) -> Outcome:
        outcome = super().execute(plan)
        one = np.zeros(8, np.float32)
        wrong: dict[str, Any] = {
            "missing": {},
            "of a row that samples": {**outcome.pooled, 1: one},
            "of no row": {**outcome.pooled, 9: one},
            "too long": {0: np.zeros(9, np.float32)},
            "of another type": {0: np.zeros(8)},
            "a list": {0: [0.0] * 8},
            "no numbers": {0: np.full(8, np.nan, np.float32)},
            "of a chunk": dict.fromkeys(plan.pooled, one),
        }
        return replace(outcome, pooled=wrong[self.how])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "no vector for row 0"),
        ("of a row that samples", "a vector for row 1, which does not pool"),
        ("of no row", "row 9"),
        ("too long", "no array of 8"),
        ("of another type", "no array of 8"),
        ("a list", "no array of 8"),
        ("no numbers", "not finite"),
        ("of a chunk", "a vector for row 0"),
    ],
)
def test_vectors_that_cannot_be_fail_the_step(how: str, words: str) -> None:
    executor = sim(type("Wrong", (Wrong,), {"how": how}))
    core = make_core(executor=executor, max_batch_tokens=8)
    request = core.add([1] * (20 if how == "of a chunk" else 5), pooling=LAST)
    core.add([2, 3], SamplingParams(max_tokens=2))
    finish(core)
    assert request.finish is Finish.ERROR
    assert words in (request.detail or "")
    core.close()


class Fragile(SimExecutor):
    """Rows of requests that begin with 13 fail alone."""

    def execute(self, plan: Plan) -> Outcome:
        outcome = super().execute(plan)
        bad = {row: "a bad row" for row, request in enumerate(plan.requests) if request.tokens[0] == 13}
        pooled = {row: found for row, found in outcome.pooled.items() if row not in bad}
        tokens = [() if row in bad else said for row, said in enumerate(outcome.tokens)]
        return replace(outcome, tokens=tokens, pooled=pooled, errors=bad)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_fails_leaves_the_others_what_they_are(overlap: bool) -> None:
    core = make_core(executor=sim(Fragile), overlap=overlap, max_batch_tokens=16)
    requests = [core.add(prompt, pooling=MEAN) for prompt in (PROMPTS[0], [13] * 20, PROMPTS[1])]
    deltas = finish(core)
    assert (requests[1].finish, requests[1].detail) == (Finish.ERROR, "a bad row")
    for at, request in ((0, requests[0]), (1, requests[2])):
        np.testing.assert_array_equal(vector(deltas, request), WANTED["mean"][at].astype(np.float32))
    core.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_one_that_is_aborted_in_the_middle_is_gone(overlap: bool) -> None:
    core = make_core(executor=sim(), overlap=overlap, max_batch_tokens=8)
    request = core.add(PROMPTS[0], pooling=MEAN)
    core.step()
    core.step()
    assert core.abort(request.id)
    [end] = finish(core)
    assert (end.finish, end.vector) == (Finish.ABORT, b"")
    assert core.counters.finished["finished_abort"] == 1
    core.close()


def test_forecasts_of_outputs_learn_nothing_from_those_that_have_none() -> None:
    """Else whoever embeds a thousand texts makes every answer look short."""
    past, shortest = make("policy", "past-future"), make("policy", "shortest-predicted")
    core = make_core(executor=sim(), policies=[past, shortest], num_pages=200)  # type: ignore[list-item]
    talk = core.add([1, 2], SamplingParams(max_tokens=5))
    finish(core)
    for _ in range(20):
        core.add([1, 2, 3], pooling=LAST)
    finish(core)
    assert past._lengths == [5]  # type: ignore[attr-defined]
    assert shortest._lengths.predict(replace(talk, tokens=[1, 2], max_total=100)) == 5  # type: ignore[attr-defined]
    core.close()


@pytest.mark.parametrize("kvcache", KVCACHES)
@pytest.mark.parametrize("scheduler", ["unified", "radix"])
def test_a_recording_with_them_replays(scheduler: str, kvcache: str, tmp_path: Path) -> None:
    core = make_core(
        executor=sim(), scheduler=scheduler, kvcache=kvcache, overlap=True, max_batch_tokens=9,
        record=RecordOptions(on=True),
    )  # fmt: skip
    for prompt in PROMPTS:
        core.add(prompt, pooling=MEAN)
        core.add(prompt, SamplingParams(max_tokens=3))
        core.add(prompt, pooling=Pooling())
        core.step()
    finish(core)
    core.record.write(tmp_path / "pooled.jsonl")
    core.close()
    log = read(tmp_path / "pooled.jsonl")
    assert {add.pooling for add in log.adds.values()} == {"", "mean", "last"}
    report = replay(log, "pooled")
    assert report.divergence is None
    assert report.steps > 10
    simulated = simulate(log, Setup.of(log.header.config), StepTimes(constant=0.01))
    assert simulated.ended == {"stop": 2 * len(PROMPTS), "length": len(PROMPTS)}
