"""Faults that users of such engines reported, at the level of scheduler and cache (the ids are the project's own)."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.core import EngineCore, InvalidRequest, Outcome, SamplingParams, State, Why
from engine.testing import ScriptedExecutor, ShadowExecutor, make_core

COMBINATIONS = list(itertools.product(("unified", "radix"), ("paged", "radix")))
every_combination = pytest.mark.parametrize(("scheduler", "kvcache"), COMBINATIONS)


def drain(core: EngineCore, limit: int = 2000) -> dict[str, tuple[list[int], str | None, str | None]]:
    """Step until nothing is left; id -> (output, finish, detail)."""
    results: dict[str, tuple[list[int], str | None, str | None]] = {}
    for _ in range(limit):
        if not core.has_work:
            return results
        for delta in core.step():
            output = results.get(delta.request_id, ([], None, None))[0]
            results[delta.request_id] = (output + list(delta.tokens), delta.finish, delta.detail)
    raise AssertionError(f"not finished after {limit} steps: {core.requests}")


def next_token(request) -> int:
    """A token that depends on the request's own tokens only."""
    return (request.tokens[-1] * 31 + request.num_tokens) % 997


@every_combination
@pytest.mark.parametrize("max_tokens", [1, None, 10])
@pytest.mark.parametrize("resumed", [False, True])
def test_b01_prompts_around_the_models_length(scheduler, kvcache, max_tokens, resumed):
    core = make_core(
        scheduler=scheduler,
        kvcache=kvcache,
        max_model_len=64,
        max_batch_tokens=16,
        num_pages=40,
        executor=ShadowExecutor(),
    )
    for length in (64, 65):
        with pytest.raises(InvalidRequest, match=rf"prompt: has {length} tokens; at most 63 .*limit of 64"):
            core.add(list(range(length)), SamplingParams(max_tokens=max_tokens))
    if max_tokens == 10:
        with pytest.raises(InvalidRequest, match="63 prompt tokens \\+ max_tokens 10 = 73 is above the limit of 64"):
            core.add(list(range(63)), SamplingParams(max_tokens=10))
        return
    request = core.add(list(range(63)), SamplingParams(max_tokens=max_tokens), request_id="a")
    steps = 0
    while core.has_work:
        plan = core.plan()
        assert plan.total_tokens > 0, "a step without tokens while a request is unfinished"
        core.commit(core.executor.execute(plan))
        steps += 1
        if resumed and steps == 2:
            core.take_deltas()
            core.give_up(request, front=True)
        if request.finished:
            break
    assert request.finish == "length"
    assert request.num_output == 1
    core.take_deltas()
    assert not core.has_work


@every_combination
def test_b02_larger_than_the_pool(scheduler, kvcache):
    core = make_core(scheduler=scheduler, kvcache=kvcache, num_pages=10, page_size=16, max_model_len=512)
    for length in (161, 200):
        with pytest.raises(InvalidRequest, match=rf"prompt: has {length} tokens, but the whole KV pool holds 160"):
            core.add([1] * length, SamplingParams(max_tokens=1))
        core.add([2] * 5, SamplingParams(max_tokens=1), request_id=f"short{length}")
        assert drain(core)[f"short{length}"][1] == "length"
    core.add([3] * 160, SamplingParams(max_tokens=1), request_id="whole pool")
    core.add([4] * 5, SamplingParams(max_tokens=1), request_id="behind it")
    results = drain(core)
    assert {name: result[1:] for name, result in results.items()} == {
        "whole pool": ("length", None),
        "behind it": ("length", None),
    }


@every_combination
def test_b02_fits_now_but_outgrows_the_pool(scheduler, kvcache):
    core = make_core(scheduler=scheduler, kvcache=kvcache, num_pages=10, page_size=16, max_model_len=512)
    core.add(list(range(100)), SamplingParams(max_tokens=100), request_id="grows")
    core.add([4] * 5, SamplingParams(max_tokens=3), request_id="short")
    results = drain(core)
    output, finish, detail = results["grows"]
    assert (finish, detail) == ("length", "kv_capacity")
    assert len(output) == 160 - 100 + 1  # the last sampled token needs no page of its own
    assert results["short"][1:] == ("length", None)


@every_combination
@pytest.mark.parametrize("page_size", [1, 2])
def test_b02_prompt_and_output_exactly_the_pool(scheduler, kvcache, page_size):
    core = make_core(scheduler=scheduler, kvcache=kvcache, num_pages=32 // page_size, page_size=page_size)
    core.add(list(range(20)), SamplingParams(max_tokens=13), request_id="exact")
    output, finish, detail = drain(core)["exact"]
    assert (len(output), finish, detail) == (13, "length", None)


def _bring_to(core: EngineCore, state: str) -> None:
    """Add the request ``victim`` and bring it into a state."""
    if state == "parked":
        core.add(list(range(30)), SamplingParams(max_tokens=8), request_id="victim", parked_on=["grammar"])
        core.step()
        return
    core.add(list(range(30)), SamplingParams(max_tokens=8), request_id="victim")
    if state == "queued":
        return
    core.step()
    if state == "mid-chunk":
        assert 0 < core.requests["victim"].computed < 30
        return
    for _ in range(3):
        core.step()
    if state == "preempted":
        core.give_up(core.requests["victim"], front=False)
        assert core.requests["victim"].state is State.WAITING


@every_combination
@pytest.mark.parametrize(
    "state", ["queued", "mid-chunk", "decoding", "preempted", "parked", "in flight", "twice", "ended"]
)
def test_b09_abort_in_each_state(scheduler, kvcache, state):
    def run(abort: bool) -> dict[str, tuple[list[int], str | None]]:
        executor = ShadowExecutor(next_token)
        core = make_core(scheduler=scheduler, kvcache=kvcache, executor=executor, max_batch_tokens=16, num_pages=60)
        requests = [core.add([7, 8, 9], SamplingParams(max_tokens=20), request_id="neighbour1")]
        if abort:
            _bring_to(core, state)
            requests.append(core.requests["victim"])
        requests.append(core.add([9, 9, 1, 4], SamplingParams(max_tokens=20), request_id="neighbour2"))
        if abort and state == "in flight":
            plan = core.plan()
            while core.requests["victim"] not in plan.requests:
                core.commit(executor.execute(plan))
                plan = core.plan()
            assert core.abort("victim")
            core.commit(executor.execute(plan))
        elif abort and state == "ended":
            drain(core)
            assert not core.abort("victim")
        elif abort:
            assert core.abort("victim")
            assert core.abort("victim") is False
        core.check()
        drain(core)
        assert core.kv.numbers().pinned == 0
        assert executor.forgotten.count("victim") == (1 if abort else 0)
        return {request.id: (request.output, request.finish) for request in requests}

    clean, aborted = run(False), run(True)
    for name in ("neighbour1", "neighbour2"):
        assert aborted[name] == clean[name], "a neighbour's output changed"
    assert aborted["victim"][1] == ("length" if state == "ended" else "abort")


@every_combination
def test_b09_storm_of_aborts(scheduler, kvcache):
    rng = random.Random(5)
    core = make_core(scheduler=scheduler, kvcache=kvcache, executor=ShadowExecutor(next_token), num_pages=40)
    aborted, ended = 0, {}
    while aborted < 1000:
        while len(core.requests) < 12:
            core.add(
                [rng.randrange(3) for _ in range(rng.randrange(1, 40))], SamplingParams(max_tokens=rng.randrange(1, 20))
            )
        for _ in range(rng.randrange(3)):
            aborted += core.abort(rng.choice(sorted(core.requests) or ["gone"]))
        for delta in core.step():
            if delta.finish:
                assert delta.request_id not in ended
                ended[delta.request_id] = delta.finish
    drain(core)
    assert core.kv.numbers().pinned == 0


def test_b10_one_id_one_live_request():
    core = make_core()
    core.add([1], SamplingParams(max_tokens=5), request_id="a")
    with pytest.raises(InvalidRequest, match="request_id: 'a' is in use"):
        core.add([2], request_id="a")
    core.abort("a")
    core.add([2], SamplingParams(max_tokens=2), request_id="a")
    assert drain(core)["a"][1] == "length"
    for odd in ("", "ü" * 10, "x" * 2**20):
        core.add([1], SamplingParams(max_tokens=1), request_id=odd)
    assert len(drain(core)) == 3


@every_combination
@pytest.mark.parametrize("length", [15, 16, 17, 32, 48])
@pytest.mark.parametrize("page_size", [1, 16])
def test_b14_prompt_fully_in_the_cache(scheduler, kvcache, length, page_size):
    executor = ShadowExecutor(next_token)
    core = make_core(
        scheduler=scheduler,
        kvcache=kvcache,
        executor=executor,
        page_size=page_size,
        num_pages=2048 // page_size,
        max_batch_tokens=64,
    )
    prompt = [at % 11 for at in range(length)]
    results = []
    for turn in range(3):
        request = core.add(prompt, SamplingParams(max_tokens=3), request_id=f"turn{turn}")
        results.append(drain(core)[f"turn{turn}"][0])
        assert request.cached_tokens == (0 if turn == 0 else (length - 1) // page_size * page_size)
    assert results[0] == results[1] == results[2]
    longer = core.add([*prompt, 5, 6], SamplingParams(max_tokens=3), request_id="longer")
    drain(core)
    assert longer.cached_tokens == length // page_size * page_size


@every_combination
def test_b14_resume_with_its_own_pages_still_cached(scheduler, kvcache):
    core = make_core(scheduler=scheduler, kvcache=kvcache, executor=ShadowExecutor(next_token), max_batch_tokens=16)
    request = core.add(list(range(40)), SamplingParams(max_tokens=10), request_id="a")
    for _ in range(5):
        core.step()
    known = request.num_tokens
    core.give_up(request, front=True)
    core.check()
    core.step()
    assert request.state is State.RUNNING
    assert 0 < request.computed <= known
    assert core.counters.cached_tokens >= 36
    drain(core)
    assert request.num_output == 10


@every_combination
@pytest.mark.parametrize("fault", ["abort", "preempt", "fail"])
@pytest.mark.parametrize("at_step", [0, 1, 2])
def test_b15_nothing_matchable_before_it_is_computed(scheduler, kvcache, fault, at_step):
    executor = ShadowExecutor(next_token)
    core = make_core(scheduler=scheduler, kvcache=kvcache, executor=executor, max_batch_tokens=16, page_size=4)
    prompt = [at % 13 for at in range(40)]
    request = core.add(prompt, SamplingParams(max_tokens=3), request_id="first")
    for _ in range(at_step):
        core.step()
    committed = request.computed
    plan = core.plan()
    if fault == "fail":
        core.fail_step(plan, "injected")
        assert request.finish == "error"
        assert "injected" in request.detail
        probe = core.add(prompt, SamplingParams(max_tokens=3), request_id="probe")
        assert core.kv.match(probe).tokens <= committed, "uncomputed pages are matchable"
    elif fault == "abort":
        core.abort("first")
        core.commit(executor.execute(plan))
    else:
        core.give_up(request, front=True)
        core.commit(executor.execute(plan))
        core.abort("first")
    again = core.add(prompt, SamplingParams(max_tokens=3), request_id="again")
    drain(core)
    cold = make_core(executor=ScriptedExecutor(next_token))
    cold.add(prompt, SamplingParams(max_tokens=3), request_id="cold")
    assert again.output == drain(cold)["cold"][0]
    assert executor.mismatch is None


@every_combination
def test_b15_twins_in_one_step(scheduler, kvcache):
    executor = ShadowExecutor(next_token)
    core = make_core(scheduler=scheduler, kvcache=kvcache, executor=executor)
    for name in ("one", "two"):
        core.add([at % 13 for at in range(20)], SamplingParams(max_tokens=4), request_id=name)
    results = drain(core)
    assert results["one"][0] == results["two"][0]
    # Pages published when planned are shared within the step; a tree filled on commit computes them twice.
    assert core.counters.cached_tokens == (16 if kvcache == "paged" else 0)
    assert executor.mismatch is None


def test_b17_double_release_raises():
    from engine.core import InvariantViolation
    from engine.core.pages import PagePool

    pool = PagePool(8, 4)
    pages = pool.take(3)
    pool.give(pages[:2])
    for wrong in (pages[:1], pages[1:], [pages[2], pages[2]], [7]):
        with pytest.raises(InvariantViolation, match="released twice or never taken"):
            pool.give(wrong)
        pool.check()
    pool.give(pages[2:])
    assert pool.num_free == 8


@pytest.mark.parametrize(
    ("field", "params", "tokens"),
    [
        ("prompt", {}, [-1]),
        ("prompt", {}, [1000]),
        ("prompt", {}, [2**63]),
        ("prompt", {}, []),
        ("prompt", {}, [1.5]),
        ("prompt", {}, [True]),
        ("stop_token_ids", {"stop_token_ids": (1000,)}, [1]),
        ("top_k", {"top_k": -1}, [1]),
        ("temperature", {"temperature": -1.0}, [1]),
        ("temperature", {"temperature": float("nan")}, [1]),
        ("temperature", {"temperature": 1e9}, [1]),
        ("top_p", {"top_p": 0.0}, [1]),
        ("top_p", {"top_p": 2.0}, [1]),
        ("top_p", {"top_p": float("nan")}, [1]),
        ("max_tokens", {"max_tokens": 0}, [1]),
        ("max_tokens", {"max_tokens": 10**9}, [1]),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 3}, [1]),
        ("seed", {"seed": 2**64}, [1]),
        ("stop", {"stop": ("END", "")}, [1]),
        ("stop", {"stop": tuple("abcdefghijklmnopqrstuvwxyz")}, [1]),
    ],
)
def test_b33_numbers_out_of_range_are_refused_and_touch_nothing(field, params, tokens):
    core = make_core(executor=ScriptedExecutor(next_token))
    core.add([5], SamplingParams(max_tokens=4), request_id="good")
    core.step()
    with pytest.raises(InvalidRequest) as refused:
        core.add(tokens, SamplingParams(**params))
    assert refused.value.field == field
    alone = make_core(executor=ScriptedExecutor(next_token))
    alone.add([5], SamplingParams(max_tokens=4), request_id="good")
    first = alone.step()[0].tokens
    assert list(first) + drain(core)["good"][0] == list(first) + drain(alone)["good"][0]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "accepted"),
    [
        (63, 1, True),
        (63, 2, False),
        (64, 1, False),
        (30, 34, True),
        (30, 35, False),
        (30, None, True),
        (30, 10**12, False),
    ],
)
def test_b40_prompt_and_max_tokens_against_the_limit(prompt, max_tokens, accepted):
    core = make_core(max_model_len=64)
    params = SamplingParams(max_tokens=max_tokens)
    if accepted:
        core.add([1] * prompt, params, request_id="a")
        output, finish, _ = drain(core)["a"]
        assert (len(output), finish) == (max_tokens or 64 - prompt, "length")
    else:
        with pytest.raises(InvalidRequest, match="64"):
            core.add([1] * prompt, params)


def test_failing_steps_end_their_own_requests_only():
    executor = ShadowExecutor(next_token)
    core = make_core(scheduler="unified", executor=executor, max_batch_tokens=8, max_running=1)
    core.add([1, 2, 3], SamplingParams(max_tokens=3), request_id="hit")
    core.add([4, 5, 6], SamplingParams(max_tokens=3), request_id="spared")
    executor.fail_next = 1
    results = drain(core)
    assert results["hit"][1] == "error"
    assert "scripted failure" in (results["hit"][2] or "")
    assert results["spared"][1] == "length"
    assert core.counters.failed_steps == 1


def test_an_executor_that_says_it_is_broken_stops_the_engine_after_its_requests_were_told():
    from engine.core import ExecutionError

    executor = ScriptedExecutor(next_token)
    core = make_core(executor=executor)
    for number in range(5):  # failing alone is no reason to stop
        executor.fail_next = 1
        core.add([1], SamplingParams(max_tokens=1), request_id=f"r{number}")
        assert core.step()[0].finish == "error"
    executor.fail_next, executor.broken_cause = 1, "the device is lost"
    core.add([1], SamplingParams(max_tokens=1), request_id="last")
    assert core.step()[0].finish == "error"
    with pytest.raises(ExecutionError, match="cannot go on: the device is lost"):
        core.step()


@every_combination
def test_a_failed_row_leaves_nothing_behind(scheduler, kvcache):
    """Neither its prompt nor what its twin took from it in the same step may ever be matched."""
    executor = ShadowExecutor(next_token)
    core = make_core(scheduler=scheduler, kvcache=kvcache, executor=executor)
    prompt = [at % 13 for at in range(20)]
    twins = [core.add(prompt, SamplingParams(max_tokens=4), request_id=name) for name in ("bad", "twin")]
    executor.row_errors = {"bad": "logits are not numbers"}
    results = drain(core)
    again = core.add(prompt, SamplingParams(max_tokens=4), request_id="again")
    results |= drain(core)
    assert results["bad"] == ([], "error", "logits are not numbers")
    assert results["twin"][1] == "length"
    assert twins[1].output == again.output
    assert executor.mismatch is None
    alone = make_core(scheduler=scheduler, kvcache=kvcache, executor=ShadowExecutor(next_token))
    bad = alone.add(prompt, SamplingParams(max_tokens=4), request_id="bad")
    alone.executor.row_errors = {"bad": "logits are not numbers"}
    drain(alone)
    probe = alone.add(prompt, SamplingParams(max_tokens=1))
    assert bad.finish == "error"
    assert alone.kv.match(probe).tokens == 0


def test_a_row_that_fails_alone():
    executor = ShadowExecutor(next_token)
    core = make_core(executor=executor)
    for name in ("bad", "good"):
        core.add([1, 2, 3], SamplingParams(max_tokens=3), request_id=name)
    executor.row_errors = {"bad": "logits are not numbers"}
    results = drain(core)
    assert results["bad"] == ([], "error", "logits are not numbers")
    assert results["good"][1] == "length"


@pytest.mark.parametrize("kvcache", ["paged", "radix"])
def test_a_row_that_fails_after_its_abort_leaves_nothing_behind(kvcache):
    """Found by the long random walks: aborted between plan and commit, and then its row fails."""
    executor = ShadowExecutor(next_token)
    core = make_core(kvcache=kvcache, executor=executor)
    prompt = [at % 13 for at in range(20)]
    core.add(prompt, SamplingParams(max_tokens=4), request_id="bad")
    plan = core.plan()
    core.abort("bad")
    executor.row_errors = {"bad": "logits are not numbers"}
    core.commit(executor.execute(plan))
    probe = core.add(prompt, SamplingParams(max_tokens=4), request_id="probe")
    assert core.kv.match(probe).tokens == 0
    drain(core)
    assert executor.mismatch is None


def test_the_radix_heap_does_not_grow_with_requests():
    core = make_core(kvcache="radix", num_pages=64, executor=ScriptedExecutor(next_token), audit=False)
    for number in range(1500):
        core.add([number % 3] * 9, SamplingParams(max_tokens=2))
        drain(core)
    assert len(core.kv.tree._heap) < 200


def test_a_token_outside_the_vocabulary_ends_its_request():
    core = make_core(executor=ScriptedExecutor({"bad": [5, 5000]}))
    core.add([1], SamplingParams(max_tokens=5), request_id="bad")
    output, finish, detail = drain(core)["bad"]
    assert (output, finish) == ([5], "error")
    assert "5000" in (detail or "")


def test_an_outcome_of_another_plan_is_refused():
    from engine.core import InvariantViolation

    core = make_core()
    core.add([1, 2], SamplingParams(max_tokens=4))
    old = core.plan()
    core.commit(core.executor.execute(old))
    plan = core.plan()
    with pytest.raises(InvariantViolation, match="own outcome"):
        core.commit(Outcome(old, [(1,)]))
    with pytest.raises(InvariantViolation, match="own outcome"):
        core.commit(Outcome(plan, []))
    core.commit(core.executor.execute(plan))


@pytest.mark.parametrize("overlap", [False, True])
@every_combination
def test_b04_two_that_outgrow_the_pool_do_not_thrash(scheduler, kvcache, overlap):
    """Room for one and a half: prompts longer than a step's budget, both growing to the size of the pool."""
    core = make_core(
        scheduler=scheduler,
        kvcache=kvcache,
        executor=ShadowExecutor(next_token),
        num_pages=24,
        page_size=4,
        max_batch_tokens=16,
        overlap=overlap,
    )
    for name in ("a", "b"):
        core.add([len(name) + at % 23 + ord(name) for at in range(40)], SamplingParams(max_tokens=30), request_id=name)
    results = drain(core)
    assert {name: (len(output), finish) for name, (output, finish, _) in results.items()} == {
        "a": (30, "length"),
        "b": (30, "length"),
    }
    useful = 2 * (40 + 30)
    assert core.counters.preemptions <= 3
    assert core.counters.recomputed_tokens <= useful


def test_b12_a_long_prompt_shares_its_steps():
    """100 chunks long; ten short prompts behind it get their first token within a few steps each."""
    core = make_core(
        num_pages=800,
        page_size=4,
        max_batch_tokens=16,
        max_running=12,
        scheduler_options={"long_prefill_token_threshold": 8},
        audit=False,
    )
    core.add([at % 97 for at in range(1600)], SamplingParams(max_tokens=1), request_id="long")
    core.step()
    for number in range(10):
        core.add([900 + number] * 8, SamplingParams(max_tokens=2), request_id=f"s{number}")
    first: dict[str, int] = {}
    for step in range(1, 300):
        for delta in core.step():
            first.setdefault(delta.request_id, step)
        if not core.has_work:
            break
    assert max(first[f"s{number}"] for number in range(10)) <= 2 * 10 + 2
    assert first["long"] <= 1600 // 8 + 2, "the long one pays its share and no more"


@pytest.mark.parametrize("overlap", [False, True])
@every_combination
@pytest.mark.parametrize("times", [1, 2])
def test_b45_preempted_after_any_token_the_output_is_the_same(scheduler, kvcache, overlap, times):
    params = SamplingParams(max_tokens=21, min_tokens=4, stop_token_ids=(3, 77), temperature=1.0, seed=9)

    def run(at: int | None) -> tuple[list[int], str | None]:
        core = make_core(
            scheduler=scheduler,
            kvcache=kvcache,
            executor=ShadowExecutor(next_token),
            overlap=overlap,
            num_pages=64,
            audit=False,
        )
        core.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=25), request_id="beside")
        request = core.add([9, 8, 7, 6, 5, 4], params, request_id="it")
        got: list[int] = []
        left = times
        while core.has_work:
            for delta in core.step():
                if delta.request_id == "it":
                    got += delta.tokens
            if at is not None and left and request.state is State.RUNNING and request.num_output >= at:
                core.give_up(request, front=left % 2 == 0)
                left -= 1
        core.check()
        assert core.executor.mismatch is None
        assert got == request.output, "streamed twice, or not at all"
        return got, request.finish

    expected = run(None)
    for at in range(21):
        assert run(at) == expected


def test_adapters_above_the_limit_wait_and_those_behind_them_do_not():
    core = make_core(scheduler_options={"max_adapters": 1})
    for name, adapter in (("a", "red"), ("b", "blue"), ("c", ""), ("d", "red")):
        core.add([1, 2, 3], SamplingParams(max_tokens=3), request_id=name, adapter=adapter)
    plan = core.plan()
    assert [request.id for request in plan.admitted] == ["a", "c", "d"]
    assert core.why("b") == (Why.ADAPTERS, "")
    core.commit(core.executor.execute(plan))
    assert drain(core)["b"][1] == "length"


def test_pages_that_all_rows_share_are_counted():
    core = make_core(num_pages=64, page_size=4)
    shared = list(range(10))
    core.add([*shared, 20, 21], SamplingParams(max_tokens=4))
    core.step()
    core.add([*shared, 30], SamplingParams(max_tokens=4))
    core.step()
    plan = core.plan()
    assert len(plan.requests) == 2
    assert plan.common_prefix_pages == 2
    core.commit(core.executor.execute(plan))
    core.add([5] * 5, SamplingParams(max_tokens=4))
    assert core.plan().common_prefix_pages == 0


def test_a_step_in_numbers():
    core = make_core(num_pages=64, page_size=4, max_batch_tokens=16)
    assert core.step_stats() is None
    core.add(list(range(9)), SamplingParams(max_tokens=4))
    core.step()
    core.add([*range(9), 50], SamplingParams(max_tokens=4))
    core.add(list(range(100, 130)), SamplingParams(max_tokens=4))
    core.step()
    stats = core.step_stats()
    assert stats is not None
    assert (stats.rows, stats.decode_rows, stats.admitted, stats.cached_tokens) == (3, 1, 2, 8)
    assert (stats.tokens, stats.prefill_tokens, stats.draft_tokens) == (16, 15, 0)
    assert core.stats()["looked_up_tokens"] == 9 + 10 + 30
