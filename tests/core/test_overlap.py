"""Overlap mode: each step is planned before the outcome of the one before is known."""

from __future__ import annotations

import itertools
import threading

import pytest

from engine.core import EngineError, Outcome, SamplingParams, State, Why
from engine.core.pipeline import Pipeline
from engine.testing import ScriptedExecutor, ShadowExecutor, make_core

COMBINATIONS = list(itertools.product(("unified", "radix"), ("paged", "radix")))
every_combination = pytest.mark.parametrize(("scheduler", "kvcache"), COMBINATIONS)


def next_token(request) -> int:
    return (request.tokens[-1] * 31 + request.num_tokens) % 97


def finish(core, limit: int = 3000) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    for _ in range(limit):
        if not core.has_work:
            return outputs
        for news in core.step():
            outputs.setdefault(news.request_id, []).extend(news.tokens)
    raise AssertionError(f"not finished after {limit} steps")


def workload(core) -> None:
    for number in range(12):
        shared = [at % 17 for at in range((number % 3) * 9)]
        own = [number * 3 + at for at in range(1 + number % 5)]
        params = SamplingParams(max_tokens=12 + number % 15, stop_token_ids=(5, 40))
        core.add(shared + own, params, request_id=f"r{number}")


@every_combination
@pytest.mark.parametrize("num_pages", [16, 64])
def test_the_same_text_as_in_turns(scheduler, kvcache, num_pages):
    outputs = []
    for overlap in (False, True):
        core = make_core(
            scheduler=scheduler,
            kvcache=kvcache,
            executor=ShadowExecutor(next_token),
            num_pages=num_pages,
            max_batch_tokens=24,
            overlap=overlap,
            scheduler_options={"schedule_conservativeness": 0.02} if scheduler == "radix" else None,
        )
        workload(core)
        outputs.append(finish(core))
        assert core.executor.mismatch is None
        assert core.kv.numbers().pinned == 0
        if num_pages == 16:
            assert core.counters.preemptions > 0
    assert outputs[0] == outputs[1]


@every_combination
def test_a_request_about_to_end_by_its_length_is_not_planned_again(scheduler, kvcache):
    core = make_core(scheduler=scheduler, kvcache=kvcache, overlap=True)
    core.add([1, 2, 3], SamplingParams(max_tokens=4))
    finish(core)
    assert core.counters.computed_tokens == 3 + 3
    assert core.counters.late_results == 0


def test_a_stop_is_not_foreseen_and_the_row_planned_meanwhile_is_dropped():
    core = make_core(executor=ScriptedExecutor({"a": [7, 8, 9]}), overlap=True)
    core.add([1, 2, 3], SamplingParams(max_tokens=10, stop_token_ids=(8,)), request_id="a")
    assert finish(core) == {"a": [7, 8]}
    assert core.counters.late_results == 1


def test_a_victims_token_in_flight_is_delivered_while_it_waits():
    core = make_core(executor=ShadowExecutor(next_token), overlap=True)
    request = core.add([1, 2, 3], SamplingParams(max_tokens=10), request_id="a")
    core.step()
    core.step()
    assert (request.num_output, request.pending) == (1, 1)
    core.give_up(request, front=True)
    assert (request.state, request.pending, request.planned) == (State.WAITING, 0, 0)
    core.drain()
    assert (request.state, request.num_output) == (State.WAITING, 2)
    alone = make_core(executor=ShadowExecutor(next_token))
    alone.add([1, 2, 3], SamplingParams(max_tokens=10), request_id="a")
    assert [*request.output, *finish(core)["a"]] == finish(alone)["a"]


def test_a_victims_token_in_flight_may_end_it():
    core = make_core(executor=ScriptedExecutor({"a": [7, 8]}), overlap=True)
    request = core.add([1, 2, 3], SamplingParams(max_tokens=10, stop_token_ids=(8,)), request_id="a")
    core.step()
    core.step()
    core.give_up(request, front=True)
    [news] = core.drain()
    assert (news.tokens, news.finish) == ((8,), "stop")
    assert not core.requests
    assert len(core.waiting) == 0
    core.check()


@every_combination
def test_a_failing_step_ends_its_requests_and_later_ones_start_again(scheduler, kvcache):
    executor = ShadowExecutor(next_token)
    core = make_core(scheduler=scheduler, kvcache=kvcache, executor=executor, max_batch_tokens=16, overlap=True)
    prompt = [at % 13 for at in range(14)]
    core.add(prompt, SamplingParams(max_tokens=6), request_id="first")
    before = core.plan()
    core.add(prompt, SamplingParams(max_tokens=6), request_id="second")  # may start on pages being computed
    later = core.plan()
    with pytest.raises(EngineError, match="neither committed nor failed"):
        core.plan()
    core.fail_step(before, "injected")
    assert [news.finish for news in core.take_deltas()] == ["error"]
    if later:
        assert core.requests["second"].state is State.WAITING
    probe = core.add(prompt, SamplingParams(max_tokens=6), request_id="probe")
    assert core.kv.match(probe).tokens == 0, "what was never computed is matchable"
    outputs = finish(core)
    assert outputs["second"] == outputs["probe"]
    assert executor.mismatch is None


@every_combination
def test_a_failing_row_takes_those_along_that_started_on_its_pages(scheduler, kvcache):
    executor = ShadowExecutor(next_token)
    core = make_core(scheduler=scheduler, kvcache=kvcache, executor=executor, overlap=True)
    prompt = [at % 13 for at in range(14)]
    core.add(prompt, SamplingParams(max_tokens=6), request_id="first")
    executor.row_errors = {"first": "injected"}
    first = core.plan()
    outcome = executor.execute(first)
    core.add(prompt, SamplingParams(max_tokens=6), request_id="second")
    second = core.plan()
    later = executor.execute(second)
    core.commit(outcome)
    core.commit(later)
    if kvcache == "paged" and scheduler == "unified":  # it had started on pages of the row that failed
        assert core.requests["second"].preemptions == 1
    alone = make_core(executor=ShadowExecutor(next_token))
    alone.add(prompt, SamplingParams(max_tokens=6), request_id="second")
    assert finish(core)["second"] == finish(alone)["second"]
    assert executor.mismatch is None


def test_a_request_that_started_again_on_its_own_failing_pages_starts_once_more():
    executor = ShadowExecutor(next_token)
    core = make_core(executor=executor, max_batch_tokens=8, overlap=True)
    request = core.add([at % 13 for at in range(14)], SamplingParams(max_tokens=4), request_id="it")
    executor.row_errors = {"it": "injected"}
    first = core.plan()
    outcome = executor.execute(first)
    core.give_up(request, front=True)
    second = core.plan()
    assert second.starts == (8,), "it was to start on its own pages"
    later = executor.execute(second)
    core.commit(outcome)
    core.commit(later)
    core.check()
    finish(core)
    assert (executor.mismatch, request.finish, request.num_output) == (None, "length", 4)


def test_the_executor_works_while_the_next_step_is_planned():
    """A background executor is held until the core has planned again: in turns, this would wait for ever."""
    planned_again = threading.Event()
    threads: set[str] = set()

    class Held(ScriptedExecutor):
        overlaps = True

        def execute(self, plan):
            threads.add(threading.current_thread().name)
            if plan.index == 1:
                assert planned_again.wait(timeout=30)
            return super().execute(plan)

    core = make_core(executor=Held(), overlap=True)
    core.add([1, 2, 3], SamplingParams(max_tokens=3), request_id="a")
    plan = core.plan

    def planning():
        made = plan()
        if made.index == 2:
            planned_again.set()
        return made

    core.plan = planning
    assert finish(core)["a"] == [3, 4, 5]
    assert all(name.startswith("executor") for name in threads)
    core.close()


def test_a_failure_in_the_background_reaches_its_own_requests_only():
    class Background(ScriptedExecutor):
        overlaps = True

    core = make_core(executor=Background(), overlap=True)
    core.add([1, 2, 3], SamplingParams(max_tokens=3), request_id="a")
    core.step()
    core.executor.fail_next = 1
    core.add([4, 5], SamplingParams(max_tokens=3), request_id="b")
    outputs = finish(core)
    assert core.counters.failed_steps == 1
    assert core.counters.finished["finished_error"] >= 1
    assert all(len(tokens) <= 3 for tokens in outputs.values())
    core.add([4, 5], SamplingParams(max_tokens=3), request_id="c")
    assert len(finish(core)["c"]) == 3
    core.close()


def test_the_pipeline_computes_nothing_after_a_failure_until_it_is_cleared():
    executor = ScriptedExecutor()
    core = make_core(executor=executor, overlap=True)
    core.add([1, 2, 3], SamplingParams(max_tokens=5), request_id="a")
    pipeline = Pipeline(executor, background=False)
    executor.fail_next = 1
    first, second = core.plan(), core.plan()
    pipeline.launch(first)
    pipeline.launch(second)
    with pytest.raises(RuntimeError, match="a scripted failure"):
        pipeline.collect()
    assert executor.plans == []
    pipeline.abandon()
    pipeline.launch(first)
    assert isinstance(pipeline.collect(), Outcome)
    pipeline.close()


def test_why_is_answered_for_running_requests_too():
    core = make_core(max_batch_tokens=8, overlap=True, num_pages=64)
    long = core.add(list(range(20)), SamplingParams(max_tokens=2), request_id="long")
    core.add([1, 2], SamplingParams(max_tokens=2), request_id="behind")
    core.step()
    assert core.why("long") == (Why.TOKEN_BUDGET, "")
    assert core.why("behind")[0] is Why.TOKEN_BUDGET
    while long.num_output == 0:
        core.step()
    core.step()
    assert core.why("long") is None or core.why("long")[0] is Why.NOTHING_OWED
