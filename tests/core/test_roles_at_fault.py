"""Case B53, the roles that nobody else can play: a scheduler, KV cache or executor at fault stops the request or the
engine, with a diagnosis that names it, before a wrong token is said."""

from __future__ import annotations

import pytest

from engine.core import (
    ExecutionError,
    InvariantViolation,
    Outcome,
    OutOfPages,
    SamplingParams,
    hookimpl,
)
from engine.plugins.kvcache.paged import PagedCache
from engine.plugins.schedulers.unified import UnifiedScheduler
from engine.testing import ScriptedModel, make_core


def say(request):
    """A token that depends on all of the request's own tokens."""
    return (sum(request.tokens) * 31 + len(request.tokens) * 7) % 997


def run(core):
    for _ in range(100):
        if not core.has_work:
            return
        core.step()
    raise AssertionError("it does not end")


def all_pages_are_back(core):
    core.check()
    core.kv.reset()
    return core.pool.num_free == core.pool.num_pages


def failing(base, method, error):
    def raises(self, *args, **kwargs):
        raise error

    return type("Failing", (base,), {"name": "failing", method: raises})


@pytest.mark.parametrize(
    "error", [ValueError("lost"), OutOfPages("none"), InvariantViolation("twice"), AssertionError("hm")]
)
@pytest.mark.parametrize("method", ["match", "adopt", "take", "numbers", "release", "publish", "short"])
def test_a_cache_that_raises_stops_the_engine_in_its_own_name(method, error):
    core = make_core(kvcache=failing(PagedCache, method, error)(), max_batch_tokens=4)
    core.kv.origin = "acme 1.0"
    for n in range(3):
        core.add([n] * 9, SamplingParams(max_tokens=3))
    with pytest.raises((InvariantViolation, OutOfPages), match=r"^kvcache 'failing' of acme 1.0") as info:
        run(core)
    assert str(error) in str(info.value)
    assert info.value.__cause__ is error


@pytest.mark.parametrize("method", ["plan", "on_preempt", "on_idle", "evict"])
def test_a_scheduler_that_raises_stops_the_engine_in_its_own_name(method):
    broken = failing(UnifiedScheduler, method, ValueError("lost"))
    if method in ("plan", "evict"):
        setattr(broken, method, hookimpl(getattr(broken, method)))
    core = make_core(scheduler=broken(), num_pages=8, max_running=4)
    for n in range(4):
        core.add([n] * 9, SamplingParams(max_tokens=15))
    with pytest.raises(InvariantViolation, match="scheduler 'failing' of local code raised ValueError: lost"):
        run(core)


@pytest.mark.parametrize(("method", "asks"), [("on_end", "abort"), ("displace", "add")])
def test_a_scheduler_that_raises_between_steps_is_named_too(method, asks):
    core = make_core(scheduler=failing(UnifiedScheduler, method, ValueError("lost"))(), max_waiting=1)
    core.add([1], request_id="a")
    with pytest.raises(InvariantViolation, match="scheduler 'failing' of local code raised ValueError: lost"):
        core.abort("a") if asks == "abort" else core.add([2])


@pytest.mark.parametrize(
    ("method", "lie", "words"),
    [
        ("match", lambda real: real._replace(tokens=3), "found 3 tokens of 9: whole pages"),
        ("match", lambda real: real._replace(tokens=400), "found 400 tokens of 9"),
        ("match", lambda real: real._replace(tokens=-4), "found -4 tokens of 9"),
        ("adopt", lambda real: [*real, 5], "pinned 1 pages of a prefix of 0 tokens"),
        ("take", lambda real: real[:-1], "gave 2 pages where 3 were asked for"),
        ("take", lambda real: [*real, real[0]], "gave 4 pages where 3 were asked for"),
    ],
)
def test_a_cache_that_lies_stops_the_engine_before_anything_is_computed(method, lie, words):
    def lying(self, *args):
        return lie(getattr(PagedCache, method)(self, *args))

    core = make_core(kvcache=type("Liar", (PagedCache,), {"name": "liar", method: lying})(), audit=False)
    core.add([7] * 9, SamplingParams(max_tokens=2))
    with pytest.raises(InvariantViolation, match=f"kvcache 'liar' of local code.*{words}"):
        core.step()
    assert core.executor.plans == []


def lying_executor(lie):
    class Liar(ScriptedModel):
        name = "liar"
        lies = 0

        def execute(self, plan):
            outcome = super().execute(plan)
            if len(self.plans) == 2:
                return lie(outcome, plan)
            return outcome

    return Liar(say)


def but(outcome, **changes):
    return Outcome(**{"plan": outcome.plan, "tokens": outcome.tokens, **changes})


OUTCOMES = {
    "nothing": lambda outcome, plan: None,
    "a list": lambda outcome, plan: list(outcome.tokens),
    "fewer rows": lambda outcome, plan: but(outcome, tokens=outcome.tokens[:-1]),
    "more rows": lambda outcome, plan: but(outcome, tokens=[*outcome.tokens, [1]]),
    "no tokens": lambda outcome, plan: but(outcome, tokens=[[] for _ in outcome.tokens]),
    "too many tokens": lambda outcome, plan: but(outcome, tokens=[[1, 2, 3] for _ in outcome.tokens]),
    "one too many": lambda outcome, plan: but(outcome, tokens=[[*outcome.tokens[0], 5], *outcome.tokens[1:]]),
    "floats": lambda outcome, plan: but(outcome, tokens=[[1.0] for _ in outcome.tokens]),
    "text": lambda outcome, plan: but(outcome, tokens=[["a"] for _ in outcome.tokens]),
    "numbers for rows": lambda outcome, plan: but(outcome, tokens=[1 for _ in outcome.tokens]),
    "errors of other rows": lambda outcome, plan: but(outcome, errors={99: "?"}),
    "errors by name": lambda outcome, plan: but(outcome, errors={"r0": "?"}),
    "drafts of other rows": lambda outcome, plan: but(outcome, proposals={-1: (1,)}),
    "drafts of text": lambda outcome, plan: but(outcome, proposals={0: "abc"}),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", OUTCOMES)
def test_an_executor_that_answers_nonsense_fails_its_step_in_its_own_name(kind, overlap):
    core = make_core(executor=lying_executor(OUTCOMES[kind]), overlap=overlap)
    hit = [core.add([n + 1] * 5, SamplingParams(max_tokens=4)) for n in range(2)]
    core.step()
    core.step()
    later = core.add([9] * 5, SamplingParams(max_tokens=4))
    while core.has_work:
        core.step()
    assert [request.finish for request in hit] == ["error", "error"]
    assert all("ExecutionError: executor 'liar' of local code answered" in request.detail for request in hit)
    assert later.finish == "length"
    reference = make_core(executor=ScriptedModel(say))
    alone = reference.add([9] * 5, SamplingParams(max_tokens=4))
    while reference.has_work:
        reference.step()
    assert later.output == alone.output
    assert all_pages_are_back(core)


def test_an_executor_that_cannot_go_on_is_quoted():
    model = ScriptedModel(say)
    model.fail_next, model.broken_cause = 1, "the device is lost"
    core = make_core(executor=model)
    core.add([1], SamplingParams(max_tokens=2))
    core.step()
    core.add([1], SamplingParams(max_tokens=2))
    with pytest.raises(ExecutionError, match="cannot go on: the device is lost"):
        core.step()
