"""What a request with a ``cache_ttl`` wrote is found for that long, in both caches, as a simple model says."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import Connector, InvalidRequest, SamplingParams, TransferEvent, hookimpl
from engine.core.record.desk import RecordOptions
from engine.core.record.reading import read
from engine.core.registry import make
from engine.core.replay.log import replay
from engine.testing import make_core
from engine.testing.bench import CacheBench
from engine.testing.executors import ShadowExecutor

SIZE = 2
CACHES = ["paged", "radix"]
PARAMS = SamplingParams(max_tokens=1)


class Watcher:
    """Knows of each page that can be found what it was told."""

    def __init__(self):
        self.told = {}

    def stored(self, request, first, pages, digests, parent):
        self.told.update(zip(pages, digests, strict=True))

    def removed(self, pages):
        for page in pages:
            del self.told[page]

    def cleared(self):
        self.told.clear()


class World:
    """A cache on the bench beside a model of it: until when each prefix of whole pages is found."""

    def __init__(self, name):
        self.cache = make("kvcache", name)
        self.bench = CacheBench(self.cache, num_pages=128, page_size=SIZE)
        self.watcher = Watcher()
        self.cache.watch(self.watcher)
        self.until, self.written, self.now = {}, {}, 0.0

    def pass_time(self, seconds):
        self.now += seconds
        self.cache.expire(self.now)
        self.until = {prefix: until for prefix, until in self.until.items() if until > self.now}
        self.look()

    def expected(self, tokens):
        """Tokens of a prompt that the model knows."""
        whole = range(SIZE, len(tokens), SIZE)
        return next((end - SIZE for end in whole if tuple(tokens[:end]) not in self.until), SIZE * len(whole))

    def start(self, tokens, ttl, write):
        request = self.bench.request(tokens)
        request.cache_ttl, request.write_cache = ttl, write
        found = self.bench.hold(request).tokens
        if write:
            self._settle(request, found // SIZE, 0)
        self.written[request] = found // SIZE
        return request, found

    def write(self, request):
        """What the core does when pages are complete."""
        full = request.num_tokens // SIZE
        if request.write_cache:
            self.bench.publish(request)
            if full > self.written[request]:
                self._settle(request, full, full)
                self.written[request] = full
        self.look()

    def end(self, request):
        self.write(request)
        self.bench.release(request, keep=request.num_tokens if request.write_cache else 0)
        self.look()

    def _settle(self, request, pages, new):
        until = inf if request.cache_ttl is None else self.now + request.cache_ttl
        for end in range(SIZE, SIZE * pages + 1, SIZE):
            prefix = tuple(request.tokens[:end])
            if prefix in self.until or new:
                self.until[prefix] = max(self.until.get(prefix, 0.0), until)

    def look(self):
        self.cache.check(self.bench.running)
        self.bench.pool.check()
        assert self.watcher.told == self.cache.contents()


prompts = st.lists(st.integers(1, 2), min_size=1, max_size=9).map(tuple)
ttls = st.sampled_from([None, None, 1.0, 2.0, 5.0])


@pytest.mark.parametrize("name", CACHES)
@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(prompts, ttls, st.booleans(), st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])), max_size=20))
def test_what_is_found_is_what_the_model_knows(name, asks):
    """Requests that end at once: exactly that."""
    world = World(name)
    for tokens, ttl, write, pause in asks:
        assert world.bench.found(tokens) == world.expected(tokens)
        request, _ = world.start(tokens, ttl, write)
        world.end(request)
        world.pass_time(pause)
    world.pass_time(6.0)
    assert all(until == inf for until in world.until.values())
    assert not world.until or world.cache.numbers().evictable
    if all(ttl is not None or not write for _, ttl, write, _ in asks):
        assert world.cache.numbers().free == 128  # what is over takes no memory


@pytest.mark.parametrize("name", CACHES)
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_nothing_is_found_for_longer_and_who_holds_pages_keeps_them(name, data):
    """Requests that go on while time passes: never more than the model knows, and the books are right."""
    world, open_ = World(name), []
    for _ in range(data.draw(st.integers(0, 20))):
        what = data.draw(st.sampled_from(["start", "write", "end", "wait"]))
        if what == "start":
            tokens = data.draw(prompts)
            most = world.expected(tokens)
            request, found = world.start(tokens, data.draw(ttls), data.draw(st.booleans()))
            assert found <= most
            open_.append((request, request.pages[: found // SIZE]))
        elif what == "wait":
            world.pass_time(data.draw(st.sampled_from([0.5, 1.0, 3.0])))
        elif open_:
            at = data.draw(st.integers(0, len(open_) - 1))
            request, shared = open_[at]
            assert request.pages[: len(shared)] == shared
            world.write(request) if what == "write" else world.end(open_.pop(at)[0])
    for request, _ in open_:
        world.end(request)
    world.cache.reset()
    world.look()
    assert world.cache.numbers().pinned == 0


# ---- in the engine


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run(core):
    while core.has_work:
        core.step()


def cached(core, tokens, **more):
    request = core.add(tokens, PARAMS, **more)
    run(core)
    return request.cached_tokens


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("scheduler", ["unified", "radix"])
@pytest.mark.parametrize("name", CACHES)
def test_in_the_engine(name, scheduler, overlap):
    clock, prompt = Clock(), list(range(1, 34))
    core = make_core(kvcache=name, scheduler=scheduler, clock=clock, overlap=overlap, page_size=4)
    assert cached(core, prompt, cache_ttl=10) == 0
    clock.now = 9.0
    assert cached(core, prompt, write_cache=False) == 32  # leaves no trace
    clock.now = 10.0
    assert core.cache.explain(prompt)["cached_tokens"] == 0
    assert cached(core, prompt, cache_ttl=10) == 0
    clock.now = 19.0
    assert cached(core, prompt, cache_ttl=10) == 32  # prolongs
    clock.now = 28.0
    assert cached(core, prompt) == 32  # for ever
    clock.now = 1e6
    assert cached(core, prompt, cache_ttl=1) == 32  # takes nothing back
    clock.now = 2e6
    assert cached(core, prompt) == 32
    core.close()


@pytest.mark.parametrize("name", CACHES)
def test_one_that_runs_for_longer_keeps_its_pages(name):
    clock, prompt = Clock(), list(range(1, 34))
    core = make_core(kvcache=name, clock=clock, page_size=4)
    alone = make_core(kvcache=name, page_size=4)
    same = alone.add(prompt, SamplingParams(max_tokens=20), request_id="a")
    run(alone)
    long = core.add(prompt, SamplingParams(max_tokens=20), request_id="a", cache_ttl=3)
    for _ in range(6):
        core.step()
    clock.now = 100.0
    assert cached(core, prompt, read_cache=True, request_id="b") == 0
    run(core)
    assert (long.output, long.finish) == (same.output, "length")
    assert cached(core, prompt, request_id="c") == 32  # of the second
    core.close()
    alone.close()


@pytest.mark.parametrize("name", CACHES)
def test_a_recording_has_it(name, tmp_path):
    clock, prompt = Clock(), list(range(1, 34))
    core = make_core(record=RecordOptions(on=True), kvcache=name, clock=clock, page_size=4)
    found = []
    for clock.now in (0.0, 5.0, 12.0):
        found.append(cached(core, prompt, cache_ttl=6))
    assert found == [0, 32, 0]
    core.record.write(tmp_path / "ttl.jsonl")
    core.close()
    report = replay(read(tmp_path / "ttl.jsonl"), "ttl")
    assert (report.divergence, report.steps) == (None, 3)


@pytest.mark.parametrize("name", CACHES)
def test_what_comes_in_for_it_has_its_time(name):
    clock, prompt = Clock(), list(range(1, 34))
    core = make_core(kvcache=name, connectors=[Source()], executor=ShadowExecutor(), clock=clock, page_size=4)
    assert cached(core, prompt, cache_ttl=10) == 32
    clock.now = 9.0
    assert core.cache.explain(prompt)["cached_tokens"] == 32
    clock.now = 10.0
    assert core.cache.explain(prompt)["cached_tokens"] == 0
    core.close()


class Source(Connector):
    """Has everything."""

    name = "source"
    loads = holds = True

    def register(self, layout):
        pass

    @hookimpl
    def transfer_kv(self, transfers):
        return [
            TransferEvent(wish.id, "found", tokens=32) if wish.kind == "probe" else TransferEvent(wish.id, "done")
            for wish in transfers
        ]


class Sink(Connector):
    """Says what it was given to keep."""

    name = "sink"
    saves = True

    def __init__(self):
        super().__init__()
        self.saved = []

    def register(self, layout):
        pass

    @hookimpl
    def transfer_kv(self, transfers):
        self.saved += [wish.request_id for wish in transfers if wish.kind == "push"]
        return [TransferEvent(wish.id, "found" if wish.kind == "probe" else "done") for wish in transfers]


@pytest.mark.parametrize("holds", [False, True], ids=["store", "hand-off"])
@pytest.mark.parametrize("name", CACHES)
def test_stores_are_not_given_it(name, holds):
    """They do not forget in time. Whoever goes on with the request is."""
    sink = Sink()
    sink.holds = holds
    core = make_core(kvcache=name, connectors=[sink], executor=ShadowExecutor(), page_size=4)
    core.add(range(1, 34), PARAMS, request_id="timed", cache_ttl=10)
    core.add(range(101, 134), PARAMS, request_id="plain")
    run(core)
    assert {name.split("/")[0] for name in sink.saved} == ({"plain", "timed"} if holds else {"plain"})
    core.close()


def test_what_a_cache_or_a_value_does_not_allow_is_refused():
    core = make_core()
    for value, words in (
        (0, "above 0"),
        (-1, "above 0"),
        (2e9, "1e\\+09|1000000000"),
        ("1", "number"),
        (True, "number"),
    ):
        with pytest.raises(InvalidRequest, match="cache_ttl") as refused:
            core.add([1], cache_ttl=value)
        assert refused.match(words)
    with pytest.raises(InvalidRequest, match="cache_ttl: is for what others find"):
        core.add([1], cache_ttl=1, write_cache=False)
    type(core.kv).keeps_time, before = False, type(core.kv).keeps_time
    try:
        with pytest.raises(InvalidRequest, match="not supported by the KV cache") as refused:
            core.add([1], cache_ttl=1)
        assert refused.value.code == "unsupported"
    finally:
        type(core.kv).keeps_time = before
    core.close()
