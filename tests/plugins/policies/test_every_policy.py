"""What holds for each policy: the text is unchanged, nobody starves, nothing that clients say is a fault."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import SamplingParams
from engine.core.registry import Registry, make
from engine.testing import DoNothing, ShadowExecutor, make_core

POLICIES = [line.name for line in Registry().listing() if line.role == "policy" and line.distribution == "sixhooks"]
OPTIONS = {
    "past-future": {"warmup": 1},
    "early-reject": {"warmup": 1},
    "deadline": {"mode": "laxity"},
    "fair-share": {"weights": {"a": 2.0, "b": 0.0}},
    "dlpm": {"quantum": 8.0},
    "random-leaf": {"sample": 2},
}
KEYS = [
    "tenant", "deadline", "deadline_in", "predicted_tokens", "category", "retain", "retain_ttl",
]  # fmt: skip
HUGE = 10**400
WEIRD = [
    None, True, False, 0, -1, 3, 2**62, HUGE, -HUGE, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), "",
    "nan", "12", "-1e400", "x" * 10_000, "1" * 5000, [], [1], {}, {"a": [1]}, b"\xff", object(), "\ud800", 0.0, -0.0,
]  # fmt: skip
every = pytest.mark.parametrize("name", POLICIES)


def policy(name):
    return make("policy", name, OPTIONS.get(name, {}))


def workload(seed, count=24):
    """Prompts of a few families, so that prefixes are shared; metadata of every kind that policies read."""
    rng = random.Random(seed)
    for number in range(count):
        family = rng.randrange(4)
        prompt = [family * 50 + at for at in range(rng.randrange(0, 20))] + [500 + number] * rng.randrange(1, 12)
        yield {
            "tokens": prompt,
            "params": SamplingParams(max_tokens=rng.randrange(1, 16)),
            "request_id": f"r{number}",
            "metadata": {
                "tenant": rng.choice("abc"), "category": f"c{family}", "predicted_tokens": rng.randrange(1, 16),
                "retain": family, "retain_ttl": 60.0,
            },
        }  # fmt: skip


def run(core, requests, every_steps=2, weird=None):
    """Add a request each other step; run dry under audit. Returns the requests."""
    added = []
    pending = list(requests)
    steps = 0
    while pending or core.has_work:
        if pending and steps % every_steps == 0:
            added.append(core.add(**pending.pop(0)))
            if weird is not None:
                added[-1].metadata = {**added[-1].metadata, **weird(len(added))}
        core.step()
        steps += 1
        assert steps < 5000
    return added


@every
@pytest.mark.parametrize(
    ("scheduler", "kvcache", "overlap"),
    [("unified", "paged", False), ("unified", "paged", True), ("radix", "radix", False), ("unified", "radix", True)],
)
def test_texts_are_those_without_the_policy(name, scheduler, kvcache, overlap):
    def texts(plugin):
        executor = ShadowExecutor(lambda request: (sum(request.tokens) * 7 + request.num_tokens) % 900)
        core = make_core(
            scheduler=scheduler, kvcache=kvcache, executor=executor, policies=[plugin],
            num_pages=20, max_running=4, max_batch_tokens=32, overlap=overlap,
        )  # fmt: skip
        requests = run(core, workload(seed=3, count=16))
        assert executor.mismatch is None
        assert core.hooks.faults() == []
        return [(request.output, request.finish) for request in requests]

    assert texts(policy(name)) == texts(DoNothing())


@every
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_whatever_clients_say_is_no_fault(name, seed):
    rng = random.Random(seed)
    core = make_core(kvcache="radix", executor=ShadowExecutor(), policies=[policy(name)], num_pages=16, max_running=3)
    said = [dict(zip(KEYS, rng.sample(WEIRD, len(KEYS)), strict=True)) for _ in range(40)]
    added = run(core, workload(seed=5, count=len(said)), every_steps=1, weird=lambda n: said[n - 1])
    assert core.hooks.faults() == []
    assert all(request.finished for request in added)
    if name != "early-reject":
        assert all(request.finish == "length" for request in added)


@every
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10_000), radix=st.booleans(), aborts=st.booleans())
def test_random_loads_run_dry_with_every_page_accounted_for(name, seed, radix, aborts):
    core = make_core(
        scheduler="radix" if radix else "unified", kvcache="radix" if radix else "paged", executor=ShadowExecutor(),
        policies=[policy(name)], num_pages=14, max_running=4, max_batch_tokens=24,
    )  # fmt: skip
    rng = random.Random(seed)
    added = []
    for wish in workload(seed, count=16):
        added.append(core.add(**wish))
        for _ in range(rng.randrange(3)):
            core.step()
        if aborts and rng.random() < 0.3:
            core.abort(rng.choice(added).id)
    for _ in range(2000):
        if not core.has_work:
            break
        core.step()
    assert all(request.finish in ("length", "abort") for request in added), [r for r in added if not r.finished]
    assert core.hooks.faults() == []
    core.kv.reset()
    assert core.pool.num_free == 14


@every
def test_what_is_remembered_is_bounded_by_what_is_live(name):
    """Requests that ended or were aborted are forgotten."""
    plugin = policy(name)
    core = make_core(executor=ShadowExecutor(), policies=[plugin], num_pages=16, audit=False)
    for number in range(200):
        request = core.add([number % 900] * 6, SamplingParams(max_tokens=2), metadata={"tenant": f"t{number}"})
        core.step()
        if number % 3 == 0:
            core.abort(request.id)
    while core.has_work:
        core.step()
    core.add([1, 2, 3], SamplingParams(max_tokens=1))
    while core.has_work:
        core.step()
    held = [value for part in _parts(plugin) for value in vars(part).values() if isinstance(value, dict)]
    requests = sum(1 for book in held for key in book if type(key).__name__ == "Request")
    assert requests <= 8


def _parts(plugin):
    return [plugin, *(part for part in vars(plugin).values() if type(part).__name__ in ("Service", "OutputLengths"))]
