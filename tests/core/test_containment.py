"""Case B53: plugins that misbehave at run time. The default answers, the plugin is named and counted, the neighbours
say what they say without it, and no page is lost."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from engine.core import (
    Connector,
    EngineConfig,
    Policy,
    Reject,
    SamplingParams,
    Transfer,
    TransferEvent,
    Wait,
    assemble,
    hookimpl,
)
from engine.core.containment import FAULT_LIMIT, STAT, STAT_DISABLED
from engine.core.registry import make
from engine.plugins.frontends._metrics import plugin_families
from engine.testing import ScriptedModel, make_core

CONTAINED = ("order", "admit", "evict", "commit", "transfer_kv")
COMBINATIONS = [("unified", "paged", False), ("radix", "radix", False), ("unified", "radix", True)]


def say(request):
    """A token that depends on all of the request's own tokens."""
    return (sum(request.tokens) * 31 + len(request.tokens) * 7) % 997


def serve(policies=(), *, scheduler="unified", kvcache="paged", overlap=False, count=24, seed=1, **more):
    """A workload that fills the cache and preempts. Returns the core and what each request said."""
    rng = random.Random(seed)
    core = make_core(
        scheduler=scheduler, kvcache=kvcache, overlap=overlap, executor=ScriptedModel(say), policies=policies,
        **{"num_pages": 20, "page_size": 4, "max_running": 4, "max_batch_tokens": 24, **more},
    )  # fmt: skip
    texts, left, steps = {}, count, 0
    while left or core.has_work:
        if left and steps % 2 == 0:
            left -= 1
            shared = [rng.randrange(3)] * rng.choice((0, 8, 16))
            tokens = shared + [rng.randrange(900) for _ in range(rng.randrange(1, 12))]
            core.add(tokens, SamplingParams(max_tokens=rng.randrange(1, 14)), metadata={"tenant": rng.choice("ab")})
        for delta in core.step():
            texts.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.finish is not None:
                texts[delta.request_id].append(f"{delta.finish}: {delta.detail}")
        steps += 1
        assert steps < 3000, "it does not end"
    return core, texts


def all_pages_are_back(core):
    core.check()
    core.kv.reset()
    return core.pool.num_free == core.pool.num_pages


_plain = {}


def plain(scheduler="unified", kvcache="paged", overlap=False, **more):
    """What is said without the policy."""
    key = (scheduler, kvcache, overlap, *sorted(more.items()))
    if key not in _plain:
        _plain[key] = serve(scheduler=scheduler, kvcache=kvcache, overlap=overlap, **more)[1]
    return _plain[key]


def policy(hook, answer, name="bad"):
    """A policy that gives ``answer(*arguments)`` in one hook."""
    signatures = {
        "order": lambda self, step, waiting: answer(step, waiting),
        "admit": lambda self, step, request: answer(step, request),
        "evict": lambda self, need, pool: answer(need, pool),
        "commit": lambda self, outcome: answer(outcome),
        "transfer_kv": lambda self, transfers: answer(transfers),
    }
    function = signatures[hook]
    return type("Bad", (Policy,), {"name": name, hook: hookimpl(function)})()


def test_the_workload_evicts_and_preempts_and_asks_everything_but_transfers():
    asked = set()
    everything = type("All", (Policy,), {
        "name": "all",
        "order": hookimpl(lambda self: asked.add("order")),
        "admit": hookimpl(lambda self: asked.add("admit")),
        "evict": hookimpl(lambda self, pool: asked.add(pool.kind)),
        "commit": hookimpl(lambda self: asked.add("commit")),
    })()  # fmt: skip
    core, texts = serve([everything])
    assert asked == {"order", "admit", "cache", "running", "commit"}
    assert len(texts) == 24
    assert all_pages_are_back(core)


# ---- raising


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit, RecursionError])
@pytest.mark.parametrize("hook", ["order", "admit", "evict", "commit"])
def test_raising_in_each_hook(hook, error, caplog):
    def answer(*_):
        raise error("out of order")

    with caplog.at_level(logging.WARNING):
        core, texts = serve([policy(hook, answer)])
    assert texts == plain()
    assert all_pages_are_back(core)
    (faults,) = core.hooks.faults()
    assert (faults.plugin, faults.kinds, faults.disabled) == ("bad", {"raised": FAULT_LIMIT}, True)
    assert faults.last == f"raised {error.__name__}: out of order (in {hook})"
    assert f"policy 'bad' of local code: raised {error.__name__}" in caplog.text
    assert f"disabled after {FAULT_LIMIT} faults" in caplog.text


@pytest.mark.parametrize("hook", ["order", "admit", "evict", "commit"])
@pytest.mark.parametrize("turn", range(6))
def test_raising_once_at_each_call(hook, turn):
    calls = itertools.count()

    def answer(*_):
        if next(calls) == turn:
            raise KeyError(turn)

    core, texts = serve([policy(hook, answer)])
    assert texts == plain()
    assert next(calls) > turn + 1, "it is asked again after one fault"
    assert core.hooks.faults()[0].kinds == {"raised": 1}
    assert all_pages_are_back(core)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [Unspeakable(), ValueError("x" * 10**6), ValueError("two\nlines")])
def test_an_error_that_cannot_be_told_is_told_in_one_short_line(error):
    core, texts = serve([policy("order", lambda *_: (_ for _ in ()).throw(error))])
    assert texts == plain()
    (faults,) = core.hooks.faults()
    assert len(faults.last) < 400
    assert "\n" not in faults.last


def test_a_keyboard_interrupt_is_the_operators_and_passes():
    def answer(*_):
        raise KeyboardInterrupt

    core = make_core(policies=[policy("commit", answer)])
    core.add([1], SamplingParams(max_tokens=1))
    with pytest.raises(KeyboardInterrupt):
        core.step()


# ---- nonsense


def half_way(waiting):
    yield waiting[0]
    raise RuntimeError("half way")


def for_ever(waiting):
    while True:
        yield waiting[0]


class Impostor:
    """Equal to a request, and none."""

    def __init__(self, request):
        self.request = request
        self.__class__.__hash__ = lambda self: hash(self.request)

    def __eq__(self, other):
        return other is self.request or other is self


class Unhashable:
    __hash__ = None


class Rude:
    def __hash__(self):
        raise OSError("no hash today")


class EndlessSequence(list):
    def __iter__(self):
        return itertools.count()


ORDERS = {
    "half a generator": lambda step, waiting: half_way(waiting),
    "an endless generator": lambda step, waiting: for_ever(waiting),
    "impostors": lambda step, waiting: [Impostor(request) for request in waiting],
    "copies": lambda step, waiting: [type(waiting[0])("x", [1], 1, SamplingParams(), 2)],
    "repeated": lambda step, waiting: [*waiting, waiting[0]],
    "a set": lambda step, waiting: set(waiting),
    "ids": lambda step, waiting: [request.id for request in waiting],
    "negative": lambda step, waiting: -1,
    "text": lambda step, waiting: "first",
    "true": lambda step, waiting: True,
    "a class": lambda step, waiting: list,
    "unhashable": lambda step, waiting: [[]],
    "running": lambda step, waiting: [*waiting, *step.running, *step.running, object()],
    "rude": lambda step, waiting: [Rude()],
}
ADMITS = {
    "text": lambda step, request: "no",
    "false": lambda step, request: False,
    "negative": lambda step, request: -1,
    "class": lambda step, request: Wait,
    "no words": lambda step, request: Wait(None),
    "words of bytes": lambda step, request: Reject(b"no"),
    "a tuple": lambda step, request: ("no",),
    "rude": lambda step, request: Reject(Rude()),
}
EVICTS = {
    "negative": lambda need, pool: -1,
    "text": lambda need, pool: "abc",
    "bytes": lambda need, pool: b"abc",
    "a generator": lambda need, pool: (c.key for c in pool.candidates()),
    "a set": lambda need, pool: {c.key for c in pool.candidates()},
    "unknown": lambda need, pool: [object()] * 3,
    "unhashable": lambda need, pool: [Unhashable()],
    "rude": lambda need, pool: [Rude()],
    "negative pages": lambda need, pool: [-1, -2],
    "too many": lambda need, pool: [0] * 10**6,
    "endless": lambda need, pool: EndlessSequence([1]),
    "candidates": lambda need, pool: list(pool.candidates()),
    "numbers of the other kind": lambda need, pool: [pool.kind],
}


@pytest.mark.parametrize(("scheduler", "kvcache", "overlap"), COMBINATIONS)
@pytest.mark.parametrize(
    ("hook", "kind"),
    [("order", k) for k in ORDERS] + [("admit", k) for k in ADMITS] + [("evict", k) for k in EVICTS],
)
def test_nonsense(hook, kind, scheduler, kvcache, overlap):
    answer = {"order": ORDERS, "admit": ADMITS, "evict": EVICTS}[hook][kind]
    where = {"scheduler": scheduler, "kvcache": kvcache, "overlap": overlap}
    core, texts = serve([policy(hook, answer)], **where)
    assert texts == plain(**where)
    assert all_pages_are_back(core)
    (faults,) = core.hooks.faults()
    assert faults.plugin == "bad"
    assert 1 <= faults.faults <= FAULT_LIMIT
    assert faults.disabled == (faults.faults == FAULT_LIMIT)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("too many", "evict answered more than 20 keys"),
        ("endless", "evict answered more than 20 keys"),
        ("unhashable", "raised TypeError: unhashable type: 'Unhashable' (in evict)"),
        ("rude", "raised OSError: no hash today (in evict)"),
        ("unknown", "evict answered 3 keys, and none of them can be given up"),
    ],
)
def test_keys_are_judged_before_any_cache_sees_them(kind, words):
    core, _ = serve([policy("evict", EVICTS[kind])])
    assert words in core.hooks.faults()[0].last


def test_words_without_end_are_cut():
    seen = []
    core = make_core(policies=[policy("admit", lambda step, request: Wait("x" * 10**6) if step.running else None)])
    for n in range(2):
        core.add([n], SamplingParams(max_tokens=3), request_id=f"r{n}")
    core.step()
    seen = core.why("r1")[1]
    assert 100 < len(seen) <= 500


def test_stale_keys_beside_good_ones_are_no_fault():
    stale = []

    def answer(need, pool):
        keys = [candidate.key for candidate in pool.candidates()]
        stale.extend(keys)
        return [*stale[:1], *keys] if pool.kind == "cache" else keys

    core, texts = serve([policy("evict", answer)])
    assert texts == plain()
    assert core.hooks.faults() == []
    assert len(stale) > 10


# ---- slow


def test_slow_asks_are_faults_that_name_the_plugin_and_the_seconds(caplog):
    def answer(step, waiting):
        time.sleep(0.03)
        return list(reversed(waiting))

    with caplog.at_level(logging.WARNING):
        core, texts = serve([policy("order", answer, "slowcoach")], ask_seconds=0.02)
    (faults,) = core.hooks.faults()
    assert faults.kinds["slow"] == FAULT_LIMIT
    assert faults.disabled
    assert "policy 'slowcoach' of local code: order took 0.0" in caplog.text
    assert "0.02 s is the limit; the answer stands" in caplog.text
    assert {name: text[:-1] for name, text in texts.items()} == {name: text[:-1] for name, text in plain().items()}


def test_an_answer_that_comes_slowly_is_timed_to_its_last_item():
    def answer(step, waiting):
        for request in waiting:
            time.sleep(0.01)
            yield request

    core, _ = serve([policy("order", answer)], ask_seconds=0.008)
    assert core.hooks.faults()[0].kinds["slow"]


def test_the_limit_may_differ_by_hook_and_is_set_by_the_configuration():
    core, _ = serve([policy("admit", lambda *_: time.sleep(0.002))], ask_seconds={"admit": 0.001, "order": 9.0})
    assert core.hooks.faults()[0].kinds["slow"]
    core = assemble(EngineConfig(executor="sim", policies=["engine.testing:DoNothing"], ask_seconds=1e-9, num_pages=16))
    core.add([1, 2], SamplingParams(max_tokens=2))
    while core.has_work:
        core.step()
    assert core.hooks.faults()[0].kinds.keys() == {"slow"}
    core.close()


# ---- the limit


def test_the_limit_is_one_a_plugin_over_all_its_hooks():
    calls = []

    class Bad(Policy):
        name = "bad"

        @hookimpl
        def order(self, waiting):
            calls.append("order")
            raise ValueError

        @hookimpl
        def admit(self, request):
            calls.append("admit")
            return 7

        @hookimpl
        def commit(self, outcome):
            calls.append("commit")

    core, texts = serve([Bad()])
    assert texts == plain()
    (faults,) = core.hooks.faults()
    assert faults.faults == FAULT_LIMIT
    assert len(faults.kinds) == 2
    assert calls.count("order") + calls.count("admit") == FAULT_LIMIT
    assert calls.count("commit") < core.counters.steps, "it is asked nothing any more, not even what it did well"
    assert core.hooks.asked()["commit"] == []
    assert core.hooks.asked()["order"] == []


def test_faults_far_apart_disable_nobody(monkeypatch):
    import engine.core.containment as containment

    now = [0.0]
    monkeypatch.setattr(containment.time, "monotonic", lambda: now[0])
    hours = policy("order", lambda *_: now.__setitem__(0, now[0] + 3600) or 1 / 0)
    core, texts = serve([hours])
    (faults,) = core.hooks.faults()
    assert faults.faults > FAULT_LIMIT
    assert not faults.disabled
    assert texts == plain()


def test_a_good_neighbour_goes_on_and_is_not_counted():
    turns = []

    class Good(Policy):
        name = "good"

        @hookimpl
        def order(self, waiting):
            turns.append(len(waiting))
            return list(reversed(waiting))

    bad = policy("order", lambda *_: 1 / 0)
    core, texts = serve([bad, Good()])
    assert [faults.plugin for faults in core.hooks.faults()] == ["bad"]
    asked = len(turns)
    assert texts == serve([Good()])[1]
    assert len(turns) == 2 * asked
    assert core.hooks.asked()["order"] == ["good"]


def test_two_of_one_name_are_told_apart():
    bad, good = policy("order", lambda *_: None, "twin"), policy("order", lambda *_: 1 / 0, "twin")
    core, _ = serve([bad, good])
    assert [faults.plugin for faults in core.hooks.faults()] == ["twin#2"]


# ---- two plugins on one hook


def test_the_order_of_asking_is_that_of_the_configuration():
    told = []

    def listener(name):
        return type("Listener", (Policy,), {
            "name": name,
            **{hook: hookimpl(function) for hook, function in {
                "order": lambda self, waiting: told.append((name, "order")),
                "admit": lambda self, request: told.append((name, "admit")),
                "evict": lambda self, need, pool: told.append((name, "evict")),
                "commit": lambda self, outcome: told.append((name, "commit")),
            }.items()},
        })()  # fmt: skip

    core, texts = serve([listener("one"), listener("two"), listener("three")], scheduler="radix")
    assert texts == plain(scheduler="radix")
    for hook in ("order", "admit", "evict", "commit"):
        names = [name for name, what in told if what == hook]
        assert names == ["one", "two", "three"] * (len(names) // 3)
        assert names
    asked = core.hooks.asked()
    assert asked["plan"] == ["scheduler radix"]
    assert asked["order"] == ["one", "two", "three", "scheduler radix"]
    assert asked["evict"] == ["one", "two", "three", "scheduler radix", "kvcache paged"]
    assert asked["commit"][-3:] == ["one", "two", "three"]
    assert core.describe()["hooks"] == asked


def test_a_hook_of_the_first_that_has_an_answer_keeps_the_second_from_being_asked():
    asked = []
    first = policy("order", lambda step, waiting: list(waiting), "first")
    second = policy("order", lambda step, waiting: asked.append(1), "second")
    serve([first, second])
    assert asked == []


# ---- changing what is shown


def spoil_metadata(requests):
    for request in requests:
        request.metadata["tenant"] = "me"


CHANGES = {
    "sorts tokens": lambda requests: [request.tokens.sort() for request in requests],
    "appends tokens": lambda requests: [request.tokens.append(5) for request in requests],
    "other tokens": lambda requests: [setattr(request, "tokens", [1, 2]) for request in requests],
    "pages": lambda requests: [request.pages.reverse() or request.pages.append(0) for request in requests],
    "state": lambda requests: [setattr(request, "state", "finished") for request in requests],
    "progress": lambda requests: [setattr(request, "computed", 1000) for request in requests],
    "priority": lambda requests: [setattr(request, "priority", -5) for request in requests],
    "length": lambda requests: [setattr(request, "max_total", 3) for request in requests],
    "namespace": lambda requests: [setattr(request, "namespace", b"") for request in requests],
    "cache": lambda requests: [setattr(request, "namespace", b"mine") for request in requests],
    "epoch": lambda requests: [setattr(request, "epoch", 77) for request in requests],
    "drafts": lambda requests: [setattr(request, "drafts", (1, 2, 3)) for request in requests],
    "parked": lambda requests: [request.parked_on.add("me") for request in requests],
    "params": lambda requests: [setattr(request, "params", SamplingParams(max_tokens=1)) for request in requests],
}
SHOWN = {
    "order": lambda change: lambda step, waiting: change([*waiting, *step.running]) and None,
    "admit": lambda change: lambda step, request: change([request]) and None,
    "evict": lambda change: lambda need, pool: change([c.request for c in pool.candidates() if c.request]) and None,
    "commit": lambda change: lambda outcome: change([*outcome.plan.requests]) and None,
}


@pytest.mark.parametrize("hook", SHOWN)
@pytest.mark.parametrize("kind", CHANGES)
def test_under_audit_a_change_is_found_named_and_taken_back(hook, kind):
    core, texts = serve([policy(hook, lambda *args: SHOWN[hook](lambda rs: CHANGES[kind](rs) and None)(*args))])
    assert texts == plain()
    assert all_pages_are_back(core)
    (faults,) = core.hooks.faults()
    assert faults.kinds.get("changed")
    assert "requests are to read" in faults.last


def test_metadata_is_to_read_also_without_audit():
    core, texts = serve([policy("order", lambda step, waiting: spoil_metadata(waiting))], audit=False)
    assert texts == plain()
    assert "does not support item assignment" in core.hooks.faults()[0].last


def spoil_outcome(outcome):
    outcome.finished = ()
    outcome.tokens = ()
    outcome.dropped = (1, 2, 3)
    outcome.plan.waits.clear()


@pytest.mark.parametrize("audit", [False, True])
def test_what_commit_is_shown_is_not_what_the_core_goes_on_with(audit):
    core, texts = serve([policy("commit", spoil_outcome)], audit=audit)
    assert texts == plain()
    assert all_pages_are_back(core)


def test_lists_that_are_handed_out_are_copies():
    def answer(need, pool):
        candidates = pool.candidates()
        if isinstance(candidates, list):
            candidates.clear()

    core, texts = serve([policy("evict", answer)], audit=False)
    assert texts == plain()
    assert all_pages_are_back(core)
    step = []
    serve([policy("order", lambda view, waiting: step.append((type(view.running), type(waiting))))], count=2)
    assert set(step) == {(tuple, tuple)}


# ---- connectors


class Line(Connector):
    name = "line"

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    @hookimpl
    def transfer_kv(self, transfers):
        return self.answer(transfers)


EVENTS = {
    "raises": lambda transfers: 1 / 0,
    "a number": lambda transfers: 3,
    "text": lambda transfers: "done",
    "ids": lambda transfers: [wish.id for wish in transfers] or ["x"],
    "half": lambda transfers: (1 / 0 for _ in range(2)),
    "no name": lambda transfers: [TransferEvent(7, "done")],
}


@pytest.mark.parametrize("kind", EVENTS)
def test_a_connector_that_misbehaves_ends_no_engine_and_frees_who_waits_for_it(kind):
    core = make_core(connectors=[Line(EVENTS[kind])], num_pages=8)
    runs = core.add(list(range(8)), SamplingParams(max_tokens=12), request_id="a")
    waits = core.add([1], SamplingParams(max_tokens=1), request_id="b", parked_on=["transfer t1"])
    core.step()
    core.transfer(Transfer("t1", "pull", "b", tuple(runs.pages)))
    for _ in range(60):
        if not core.has_work:
            break
        core.step()
    assert not core.has_work
    assert (runs.finish, waits.finish) == ("length", "length")
    assert [faults.plugin for faults in core.hooks.faults()] == ["line"]
    core.kv.reset()
    assert core.pool.num_free == 6, "nobody knows whether the pages are still written: they stay fenced"
    core.check()


def test_a_policy_may_not_speak_for_a_connector_in_nonsense():
    good = Line(lambda transfers: [TransferEvent(wish.id, "done") for wish in transfers])
    core = make_core(connectors=[good], policies=[policy("transfer_kv", lambda transfers: ["?"])], num_pages=8)
    core.add([1], SamplingParams(max_tokens=1), request_id="b", parked_on=["transfer t1"])
    core.transfer(Transfer("t1", "pull", "b", ()))
    while core.has_work:
        core.step()
    assert [faults.plugin for faults in core.hooks.faults()] == ["bad"]


# ---- how it is told


def told(stats):
    """What ``/metrics`` says of plugins."""

    class Told(Collector):
        def collect(self):
            return plugin_families(stats)

    registry = CollectorRegistry()
    registry.register(Told())
    return generate_latest(registry).decode()


def test_faults_are_in_the_stats_the_description_and_the_metrics():
    bad = policy("order", lambda *_: 1 / 0)
    bad.origin = "acme 2.1"
    odd = policy("admit", lambda *_: "no" if odd.once.pop() else None, 'odd "name":x')
    odd.once = [False] * 1000 + [True]
    core, _ = serve([bad, odd])
    stats = core.stats()
    assert stats[f"{STAT}bad:raised"] == FAULT_LIMIT
    assert stats[f"{STAT_DISABLED}bad"] == 1
    assert stats[f'{STAT_DISABLED}odd "name":x'] == 0
    assert all(isinstance(value, int | float) for value in stats.values())
    (first, second) = core.describe()["faults"]
    assert (first["plugin"], first["origin"], first["disabled"]) == ("bad", "acme 2.1", True)
    assert second["kinds"] == {"answered": 1}
    text = told(stats)
    assert f'engine_plugin_faults_total{{kind="raised",plugin="bad"}} {FAULT_LIMIT}.0' in text
    assert 'engine_plugin_faults_total{kind="answered",plugin="odd \\"name\\":x"} 1.0' in text
    assert 'engine_plugin_disabled{plugin="bad"} 1.0' in text
    assert 'engine_plugin_disabled{plugin="odd \\"name\\":x"} 0.0' in text


def test_metrics_without_faults_have_the_families_and_no_samples():
    text = told(serve(count=2)[0].stats())
    assert "# TYPE engine_plugin_faults_total counter" in text
    assert "engine_plugin_faults_total{" not in text


# ---- fuzz


class Chaos(Policy):
    """Answers random nonsense in random hooks, now and then something valid or an error, and changes things."""

    name = "chaos"

    def __init__(self, seed):
        super().__init__()
        self.rng = random.Random(seed)
        self.memory = []

    def _nonsense(self, *shown):
        rng = self.rng
        self.memory = [*self.memory[-20:], *shown]
        roll = rng.random()
        if roll < 0.35:
            return None
        if roll < 0.5:
            raise rng.choice((ValueError, KeyError, SystemExit, MemoryError, StopIteration))(rng.random())
        things = [
            -1, 0, 10**30, 1.5, True, "x", b"x", [], (), {}, set(), object(), Wait("w"), Reject(3), Wait(None),
            [None], [-1], [[]], [object()] * 3, range(5), iter([1]), self.memory, (self.memory * 3)[:7], Unhashable(),
            [Rude()], TransferEvent("t", "done"), EndlessSequence([1]), half_way([1]), lambda: 1, type,
        ]  # fmt: skip
        return rng.choice(things)

    @hookimpl
    def order(self, step, waiting):
        roll = self.rng.random()
        if roll < 0.3:
            return self.rng.sample(waiting, len(waiting))
        return self._change([*waiting, *step.running]) if roll < 0.4 else self._nonsense(*waiting[:3], step)

    @hookimpl
    def admit(self, step, request):
        return Wait("not yet") if self.rng.random() < 0.1 else self._nonsense(request)

    @hookimpl
    def evict(self, need, pool):
        keys = [candidate.key for candidate in pool.candidates()]
        if self.rng.random() < 0.5:
            return self.rng.sample(keys, len(keys))
        return self._nonsense(*keys[:3], need, pool)

    @hookimpl
    def commit(self, outcome):
        return self._change(outcome.plan.requests) if self.rng.random() < 0.1 else self._nonsense(outcome)

    @hookimpl
    def transfer_kv(self, transfers):
        return self._nonsense(*transfers)

    def _change(self, requests):
        return self.rng.choice(list(CHANGES.values()))(list(requests)) and None


@pytest.mark.parametrize("seed", range(30))
def test_fuzz(seed, monkeypatch):
    """Whatever it does, texts are those without it. The limit is lifted, so that it goes on to the end."""
    import engine.core.containment as containment

    monkeypatch.setattr(containment, "FAULT_WINDOW", -1.0)
    where = dict(zip(("scheduler", "kvcache", "overlap"), COMBINATIONS[seed % 3], strict=True))
    where["page_size"], where["num_pages"] = ((1, 70), (4, 20))[seed % 2]
    core, texts = serve([Chaos(seed), Chaos(seed + 1000)], **where)
    assert texts == plain(**where), f"seed {seed}"
    assert all_pages_are_back(core), f"seed {seed}"
    first, second = core.hooks.faults()
    assert first.faults > 20
    assert not first.disabled
    assert second.plugin == "chaos#2"


def test_no_thread_and_no_clock_is_needed_for_it():
    before = threading.active_count()
    serve([Chaos(1)])
    assert threading.active_count() == before


def test_the_policies_of_the_kit_and_ours_have_no_faults():
    for name in ("fair-share", "k-lpm", "least-recompute", "soft-retention"):
        core, texts = serve([make("policy", name)])
        assert core.hooks.faults() == []
        assert {key: text[:-1] for key, text in texts.items()} == {key: text[:-1] for key, text in plain().items()}
