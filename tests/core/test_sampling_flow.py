"""What requests ask for besides tokens, through the core: log-probabilities whatever happens to a request, content that
nobody else may find, requests that end when their time is over, a queue that is bounded by tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import (
    Delta,
    Finish,
    InvalidRequest,
    Outcome,
    Plan,
    QueueFull,
    Request,
    SamplingParams,
    assemble,
)
from engine.core.config import EngineConfig
from engine.core.grammar import Grammar
from engine.core.sampling import SAMPLING, TokenLogprobs
from engine.plugins.executors.sim import SimExecutor
from engine.testing import ScriptedModel, make_core

KVCACHES = ("paged", "radix")


def sim(**options: Any) -> SimExecutor:
    return SimExecutor(SimExecutor.Options(vocab_size=500, max_model_len=200, **options))


def finish(core: Any, deltas: list[Delta] | None = None) -> list[Delta]:
    deltas = [] if deltas is None else deltas
    while core.has_work:
        deltas += core.step()
    return deltas


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ---- log-probabilities


def reported(deltas: list[Delta], request: Request) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
    """What one request was told: of its tokens, and of its prompt's."""
    mine = [delta for delta in deltas if delta.request_id == request.id]
    assert sum(bool(delta.prompt_logprobs) for delta in mine) <= 1
    return [one for delta in mine for one in delta.logprobs], [one for delta in mine for one in delta.prompt_logprobs]


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    budget=st.integers(6, 40),
    overlap=st.booleans(),
    kvcache=st.sampled_from(KVCACHES),
    scheduler=st.sampled_from(("unified", "radix")),
    seed=st.integers(0, 2**20),
)
def test_every_token_is_reported_once_and_in_order(
    prompts: list[int], budget: int, overlap: bool, kvcache: str, scheduler: str, seed: int
) -> None:
    """In chunks of any size, in company, in both loops, with preemptions at any moment, on a warm cache."""
    rng = random.Random(seed)
    core = make_core(
        scheduler=scheduler,
        kvcache=kvcache,
        executor=sim(),
        max_batch_tokens=budget,
        max_running=6,
        overlap=overlap,
        num_pages=200,
    )
    core.add([7] * 30, SamplingParams(max_tokens=2))
    finish(core)
    asking = SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=1)
    requests = [core.add([7] * length, asking) for length in prompts]
    silent = core.add([7] * 30, SamplingParams(max_tokens=6))
    deltas: list[Delta] = []
    while core.has_work:
        deltas += core.step()
        if rng.random() < 0.3 and core.running:
            deltas += core.drain()
            for victim in [request for request in core.running if rng.random() < 0.5]:
                core.give_up(victim, front=True)
    for request in requests:
        of_tokens, of_prompt = reported(deltas, request)
        assert [one.token for one in of_tokens] == request.output
        assert [one.token for one in of_prompt] == request.prompt[1:]
        assert all(len(one.top) == 2 for one in of_tokens)
        assert all(len(one.top) == 1 for one in of_prompt)
        assert request.cached_tokens == 0
    assert reported(deltas, silent) == ([], [])
    assert silent.cached_tokens > 0
    core.close()


def test_what_an_executor_does_not_act_on_is_refused_by_name() -> None:
    core = make_core(executor=ScriptedModel())
    others: dict[str, Any] = {"min_p": 0.1, "logit_bias": {1: 1.0}, "logprobs": 0, "prompt_logprobs": 0}
    others["grammar"] = Grammar.regex("a")
    for name in SAMPLING:
        with pytest.raises(InvalidRequest, match="not supported by the executor") as caught:
            core.add([1, 2], SamplingParams(**{name: others.get(name, 1.5)}))
        assert (caught.value.field, caught.value.code) == (name, "unsupported")
    assert not core.has_work


def test_an_executor_that_knows_nothing_of_all_this_goes_on_working() -> None:
    """Written for the contract as it was: no ``sampling``, outcomes of tokens alone."""
    core = make_core(executor=ScriptedModel({"a": [5, 6]}))
    core.add([1, 2], SamplingParams(max_tokens=2, temperature=0.5, top_k=3, seed=1), request_id="a")
    deltas = finish(core)
    assert [delta.tokens for delta in deltas] == [(5,), (6,)]
    assert all(delta.logprobs == delta.prompt_logprobs == () for delta in deltas)


class Wrong(ScriptedModel):
    """Reports what does not belong to its tokens."""

    sampling = SAMPLING
    how = ""

    def execute(self, plan: Plan) -> Outcome:
        outcome = super().execute(plan)
        one = TokenLogprobs(1, -1.0, 1)
        wrong: dict[str, Any] = {
            "too many": {"logprobs": {0: [one, one]}},
            "of no row": {"logprobs": {9: [one]}},
            "of another class": {"logprobs": {0: [(1, -1.0)]}},
            "of too much": {"prompt_logprobs": {0: [one] * 9}},
        }
        return replace(outcome, **wrong[self.how])


@pytest.mark.parametrize("how", ["too many", "of no row", "of another class", "of too much"])
def test_log_probabilities_that_cannot_be_fail_the_step(how: str) -> None:
    executor = Wrong()
    executor.how = how
    core = make_core(executor=executor)
    request = core.add([1, 2], SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=0))
    finish(core)
    assert request.finish is Finish.ERROR
    assert "log-probabilities" in (request.detail or "")


def test_accepted_drafts_are_reported_token_by_token() -> None:
    class Drafting(ScriptedModel):
        sampling = SAMPLING

        def execute(self, plan: Plan) -> Outcome:
            outcome = super().execute(plan)
            found = {row: [TokenLogprobs(t, -1.0, 1) for t in tokens] for row, tokens in enumerate(outcome.tokens)}
            return replace(outcome, logprobs=found)

    executor = Drafting({"a": [4, 5, 6, 7, 8, 9, 9, 9]})
    executor.drafter = lambda request: (request.tokens[-1] + 1, request.tokens[-1] + 2, 0)
    core = make_core(executor=executor)
    request = core.add([3], SamplingParams(max_tokens=6, logprobs=0), request_id="a")
    deltas = finish(core)
    assert max(len(delta.tokens) for delta in deltas) > 1
    assert [one.token for delta in deltas for one in delta.logprobs] == request.output == [4, 5, 6, 7, 8, 9]


# ---- the prefix cache


@pytest.mark.parametrize("scheduler", ["unified", "radix"])
@pytest.mark.parametrize("kvcache", KVCACHES)
@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_not_written_is_found_by_nobody(kvcache: str, scheduler: str, overlap: bool) -> None:
    core = make_core(
        scheduler=scheduler, kvcache=kvcache, executor=sim(), overlap=overlap, max_batch_tokens=8, num_pages=40
    )
    secret, shared = list(range(100, 130)), list(range(30))
    plain = SamplingParams(max_tokens=9)
    twins = [core.add(secret, plain, write_cache=False) for _ in range(2)]
    finish(core)
    assert core.kv.numbers().evictable == 0
    again = core.add(secret, plain)
    finish(core)
    assert [request.cached_tokens for request in (*twins, again)] == [0, 0, 0]
    core.add(shared, plain)
    finish(core)
    reader = core.add(shared, plain, write_cache=False)
    cold = core.add(shared, plain, read_cache=False)
    finish(core)
    assert reader.cached_tokens > 0 == cold.cached_tokens
    assert reader.output == cold.output
    core.close()


@pytest.mark.parametrize("kvcache", KVCACHES)
def test_a_preempted_request_leaves_nothing_behind_either(kvcache: str) -> None:
    core = make_core(kvcache=kvcache, executor=sim(), num_pages=12, max_batch_tokens=16)
    requests = [core.add([n] * 9, SamplingParams(max_tokens=20), write_cache=False) for n in range(4)]
    finish(core)
    assert core.counters.preemptions > 0
    assert all(request.finish is Finish.LENGTH for request in requests)
    assert core.pool.num_free == 12
    core.close()


# ---- time


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    clock = Clock()
    core = make_core(executor=sim(), clock=clock, max_running=1)
    running = core.add([1, 2], SamplingParams(max_tokens=100), deadline=5.0)
    waiting = core.add([3, 4], SamplingParams(max_tokens=100), deadline=4.0)
    parked = core.add([3, 4], SamplingParams(max_tokens=100), deadline=4.0, parked_on=["grammar"])
    free = core.add([5], SamplingParams(max_tokens=100))
    core.step()
    clock.now += 4.5
    core.step()
    assert [request.finish for request in (running, waiting, parked)] == [None, Finish.TIMEOUT, Finish.TIMEOUT]
    assert waiting.detail == "deadline: it had 4 seconds, and they have passed"
    clock.now += 1
    finish(core)
    assert running.finish is Finish.TIMEOUT
    assert 0 < running.num_output < 100
    assert (free.finish, free.num_output) == (Finish.LENGTH, 100)
    assert core.stats()["finished_timeout"] == 3
    core.close()


def test_a_request_that_cannot_begin_in_time_ends() -> None:
    clock = Clock()
    core = make_core(executor=sim(), clock=clock, max_running=1, limits={"queue_timeout": 2.0})
    first = core.add([1, 2], SamplingParams(max_tokens=50))
    second = core.add([3, 4], SamplingParams(max_tokens=50))
    core.step()
    core.drain()
    core.give_up(first, front=True)  # it has begun: its wait is not limited
    clock.now += 3
    finish(core)
    assert (first.finish, second.finish) == (Finish.LENGTH, Finish.TIMEOUT)
    assert second.detail == "queue_timeout: it waited for more than 2 seconds to begin"
    core.close()


def test_times_of_requests_that_have_ended_are_not_kept() -> None:
    core = make_core(executor=sim(), limits={"queue_timeout": 1000.0})
    for _ in range(300):
        core.add([1], SamplingParams(max_tokens=1), deadline=1e6)
        finish(core)
    assert len(core.timeouts._due) < 100
    core.close()


# ---- the queue


def test_the_queue_is_bounded_by_tokens() -> None:
    core = make_core(executor=sim(), max_running=1, limits={"max_waiting_tokens": 100})
    first = core.add([1] * 150, SamplingParams(max_tokens=3))  # alone, it may have any length
    with pytest.raises(QueueFull, match="150 prompt tokens are waiting, at most 100"):
        core.add([1])
    core.step()
    assert first.started is not None
    second = core.add([1] * 60, SamplingParams(max_tokens=1))
    with pytest.raises(QueueFull, match="no room for 41 more"):
        core.add([1] * 41)
    third = core.add([1] * 40, SamplingParams(max_tokens=1))
    assert core.stats()["waiting_tokens"] == 100
    core.abort(second.id)
    assert core.stats()["waiting_tokens"] == 40
    finish(core)
    assert third.finish is Finish.LENGTH
    assert core.stats()["waiting_tokens"] == 0
    core.close()


def test_one_request_of_the_core_is_one_sequence() -> None:
    core = make_core(executor=sim())
    with pytest.raises(InvalidRequest, match="choices"):
        core.add([1], SamplingParams(n=2))
    choices = SamplingParams(n=3, seed=4, max_tokens=8).choices()
    assert [(choice.n, choice.choice, choice.seed) for choice in choices] == [(1, 0, 4), (1, 1, 4), (1, 2, 4)]
    requests = [core.add([1], choice) for choice in choices]
    finish(core)
    assert len({tuple(request.output) for request in requests}) == 3
    core.close()


def test_limits_come_from_the_configuration() -> None:
    config = EngineConfig(executor="sim", max_n=2, max_logprobs=1, max_stop_strings=1, max_waiting_tokens=50)  # type: ignore[call-arg]
    core = assemble(config)
    assert (core.limits.max_n, core.limits.max_logprobs, core.limits.max_waiting_tokens) == (2, 1, 50)
    for field, value in {"n": 3, "logprobs": 2, "stop": ("a", "b")}.items():
        with pytest.raises(InvalidRequest) as caught:
            core.add([1], SamplingParams(**{field: value}))  # type: ignore[arg-type]
        assert (caught.value.field, caught.value.code) == (field, "above_limit")
    core.close()
