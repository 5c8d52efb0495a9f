"""Cache events: an index that follows them equals the cache, and what was never committed was never told."""

from __future__ import annotations

import time

import msgspec
import pytest
import zmq

from engine.core import ConfigError, Connector, EngineConfig, SamplingParams, TransferEvent, assemble, hookimpl
from engine.core.cache_events import (
    POOL,
    CacheBatch,
    CacheEvent,
    CacheLog,
    CacheSnapshot,
    TooOld,
    from_plain,
    parents_first,
    plain,
)
from engine.core.cache_feed import CacheFeed, next_port
from engine.core.cache_index import CacheIndex
from engine.core.cache_subscriber import CacheSubscriber
from engine.core.identity import namespace_digest, page_digests
from engine.core.registry import make
from engine.core.request import pack
from engine.testing import ScriptedModel, ShadowExecutor, make_core

ONE = SamplingParams(max_tokens=1)
SIZE = 4
both_caches = pytest.mark.parametrize("kvcache", ["paged", "radix"])
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])


def told_core(kvcache="paged", *, history=10_000, with_tokens=False, **more):
    log = CacheLog(SIZE, history=history, with_tokens=with_tokens)
    return make_core(kvcache=kvcache, cache_log=log, page_size=SIZE, **more), log


def finish(core):
    while core.has_work:
        core.step()


def said(core, tokens, *, params=ONE, **fields):
    request = core.add(tokens, params, **fields)
    finish(core)
    return request


def keys_of(core, tokens, *, salt="", adapter=""):
    return page_digests(namespace_digest(core.model.fingerprint, adapter, salt), pack(tokens), SIZE)


def kinds(log, epoch=None, first=1):
    return [(event.kind, event.key) for event in log.replay(epoch, first, 10**6).events]


def check(core, log, index=None):
    """The index (a late subscriber's, if none is given) equals the cache at the log's last event."""
    late = CacheIndex()
    late.load(log.snapshot())
    dump = core.cache.dump()
    for each in filter(None, (late, index)):
        assert (each.epoch, each.sequence) == (dump["epoch"], dump["sequence"])
        assert sorted(key.hex() for key in each.pages()) == dump["keys"]
    return late


# ---- the kinds of B30


@both_caches
def test_equal_tokens_under_two_salts_are_two_things(kvcache):
    core, log = told_core(kvcache)
    prompt = list(range(9))
    said(core, prompt, salt="a")
    said(core, prompt, salt="b")
    wanted = [*keys_of(core, prompt, salt="a"), *keys_of(core, prompt, salt="b")]
    assert [key for _, key in kinds(log)] == wanted
    assert len(set(wanted)) == 4
    assert check(core, log).match(keys_of(core, prompt, salt="b")) == 2


@both_caches
def test_equal_pages_of_one_prompt_have_keys_of_their_own(kvcache):
    core, log = told_core(kvcache)
    prompt = [7] * 13
    said(core, prompt)
    keys = keys_of(core, prompt)
    assert kinds(log) == [("stored", key) for key in keys]
    assert len(set(keys)) == 3
    assert list(check(core, log).tiers[POOL].items()) == [(keys[0], None), (keys[1], keys[0]), (keys[2], keys[1])]


@both_caches
def test_a_prefix_that_branches_is_told_once(kvcache):
    """In a radix tree the second prompt cuts the first one's node in two: no event."""
    core, log = told_core(kvcache)
    said(core, [*range(8), 1, 1, 1, 1, 1])
    before = log.place
    said(core, [*range(8), 2, 2, 2, 2, 2])
    assert kinds(log, *before) == [("stored", keys_of(core, [*range(8), 2, 2, 2, 2])[2])]
    core.kv.match(core.add([*range(4), 9, 9]))  # cuts once more, without storing anything
    assert log.place[1] == before[1] + 1
    check(core, log)


@both_caches
def test_content_that_is_there_twice_is_one_thing(kvcache):
    """Two requests that do not read the cache compute the same: stored once, removed with the last copy."""
    core, log = told_core(kvcache)
    prompt = list(range(9))
    for name in "ab":
        core.add(prompt, SamplingParams(max_tokens=2), request_id=name, read_cache=False)
    core.step()
    assert kinds(log) == [("stored", key) for key in keys_of(core, prompt)]
    finish(core)
    pages = [candidate.key for candidate in core.kv.candidates()]
    if kvcache == "paged":
        assert len(pages) == 4
        core.kv.drop(pages[:2])
        assert len(kinds(log)) == 2
    core.kv.drop(pages)
    assert sorted(key for kind, key in kinds(log) if kind == "removed") == sorted(keys_of(core, prompt))
    check(core, log)


@both_caches
def test_eviction_is_told_before_what_comes_in_its_place(kvcache):
    core, log = told_core(kvcache, num_pages=6)
    first, second = [1] * 17, list(range(100, 117))
    said(core, first)
    before = log.place
    said(core, second)
    news = kinds(log, *before)
    removed = [key for kind, key in news if kind == "removed"]
    assert removed
    assert set(removed) <= set(keys_of(core, first))
    assert [kind for kind, _ in news] == sorted((kind for kind, _ in news), key="stored".__eq__)
    check(core, log)


@both_caches
@both_loops
def test_preemption_leaves_the_index_right(kvcache, overlap):
    core, log = told_core(kvcache, num_pages=8, max_running=4, overlap=overlap)
    index = CacheIndex()
    index.load(log.snapshot())
    for n in range(4):
        core.add([n] * 9, SamplingParams(max_tokens=12))
    while core.has_work:
        core.step()
        assert index.apply(log.replay(index.epoch, index.sequence)) == "nothing"
        check(core, log, index)
    assert core.counters.preemptions


@both_caches
def test_nothing_is_told_before_the_step_has_landed(kvcache):
    core, log = told_core(kvcache)
    core.add(list(range(9)), SamplingParams(max_tokens=2))
    plan = core.plan()
    assert kinds(log) == []
    assert core.cache.dump()["keys"] == []
    core.commit(core.executor.execute(plan))
    assert len(kinds(log)) == 2


@both_caches
@both_loops
def test_what_a_failed_step_had_published_is_never_told(kvcache, overlap):
    core, log = told_core(kvcache, overlap=overlap)
    core.executor.fail_next = 1
    prompt = list(range(9))
    core.add(prompt, SamplingParams(max_tokens=2))
    finish(core)
    assert core.counters.failed_steps == 1
    assert kinds(log) == []
    core.executor.row_errors = {"r2": "bad row"}
    core.add(prompt, SamplingParams(max_tokens=2), request_id="r2")
    finish(core)
    assert kinds(log) == []
    said(core, prompt)
    assert [kind for kind, _ in kinds(log)] == ["stored", "stored"]
    check(core, log)


def test_a_copy_that_is_still_computed_does_not_speak_for_one_that_failed():
    """Two steps in flight compute the same page; the first fails in that row: not told before the second lands."""
    core, log = told_core(overlap=True)
    prompt = list(range(9))
    core.add(prompt, SamplingParams(max_tokens=3), request_id="a", read_cache=False)
    first = core.plan()
    core.add(prompt, SamplingParams(max_tokens=3), request_id="b", read_cache=False)
    second = core.plan()
    core.executor.row_errors = {"a": "bad row"}
    core.commit(core.executor.execute(first))
    core.executor.row_errors = {}
    assert kinds(log) == []
    core.commit(core.executor.execute(second))
    assert [kind for kind, _ in kinds(log)] == ["stored", "stored"]
    finish(core)
    check(core, log)


@both_caches
def test_a_flush_is_another_epoch_and_forgets_what_is_in_use(kvcache):
    core, log = told_core(kvcache)
    said(core, [1] * 9)
    core.add([2] * 9, SamplingParams(max_tokens=9), request_id="runs")
    core.step()
    core.step()
    epoch, _ = log.place
    core.cache.flush()
    assert log.place[0] != epoch
    assert kinds(log, first=0) == [("cleared", b"")]
    assert check(core, log).pages() == set()
    with pytest.raises(TooOld, match="is over"):
        log.replay(epoch, 0)
    finish(core)
    assert said(core, [2] * 9).cached_tokens == 0
    check(core, log)
    core.kv.reset()
    assert core.pool.num_free == core.pool.num_pages


def test_other_weights_are_another_epoch():
    core = assemble(EngineConfig(executor="sim", page_size=SIZE, num_pages=32, cache_events="on", audit=True))
    try:
        prompt = list(range(9))
        said(core, prompt)
        old, (epoch, _) = keys_of(core, prompt), core.cache.log.place
        core.update_weights(lambda weights: {**weights, "w": 1})
        assert core.cache.log.place == (core.cache.log.epoch, 1)
        assert core.cache.log.epoch != epoch
        assert core.cache.explain(prompt)["missing"]["why"] == "weights"
        said(core, prompt)
        assert check(core, core.cache.log).pages().isdisjoint(old)
        assert core.cache.explain(prompt)["cached_pages"] == 2
    finally:
        core.close()


# ---- tokens, tiers, and who does not tell


def test_tokens_are_told_only_where_asked_for():
    core, log = told_core(with_tokens=True)
    said(core, [*range(8), 3], salt="s", adapter="")
    events = log.replay(None, 1).events
    assert [(event.tokens, event.salt) for event in events] == [([0, 1, 2, 3], "s"), ([4, 5, 6, 7], "s")]
    core, log = told_core()
    said(core, [*range(8), 3], salt="s")
    assert b"tokens" not in msgspec.json.encode(plain(log.replay(None, 1)))


class Shelf(Connector):
    """A store that keeps keys only, and tells."""

    name = "shelf"
    saves = True

    def register(self, layout):
        self.kept = {}

    def clear(self):
        keys, self.kept = list(self.kept), {}
        self.notice("removed", keys)
        return len(keys)

    @hookimpl
    def transfer_kv(self, transfers):
        for wish in transfers:
            self.kept.update(dict.fromkeys(wish.keys))
            self.notice("stored", wish.keys)
        return [TransferEvent(wish.id, "done") for wish in transfers if wish.kind != "cancel"]


def test_a_store_tells_of_its_tier():
    core, log = told_core(connectors=[Shelf()], executor=ShadowExecutor())
    prompt = list(range(9))
    said(core, prompt)
    index = check(core, log)
    keys = set(keys_of(core, prompt))
    assert index.pages() == index.pages("shelf") == keys
    core.cache.flush()
    index = check(core, log)
    assert (index.pages(), index.pages("shelf")) == (set(), keys)
    assert core.cache.explain(prompt)["missing"]["why"] == "tier"
    assert core.cache.stats()["tiers"]["shelf"]["pages_told"] == 2
    assert core.cache.flush(tiers=True)["tiers"] == {"shelf": 2}
    assert check(core, log).pages("shelf") == set()


def test_nobody_is_told_where_nobody_listens():
    core = make_core(connectors=[Shelf()], executor=ShadowExecutor())
    assert core.exchange.connectors[0].notice is None
    assert core.cache.watch is None
    core.cache.settle()
    with pytest.raises(ConfigError, match="--cache-events on"):
        core.cache.dump()


class Mute(type(make_core().kv)):
    """A cache that does not tell."""

    def watch(self, watcher):
        return False


def test_a_cache_that_does_not_tell_is_named():
    core, log = told_core(Mute())
    said(core, list(range(9)))
    assert log.place[1] == 1
    assert core.describe()["cache_events"]["pool"] == "nothing: kvcache 'paged' does not tell"
    with pytest.raises(ConfigError, match="cannot list"):
        core.cache.dump()


# ---- the log


def test_a_snapshot_has_parents_before_children():
    core, log = told_core(num_pages=32)
    said(core, list(range(17)))
    head = next(candidate.key for candidate in reversed(core.kv.candidates()))
    core.kv.drop([head])  # the first page goes and comes back: it is the youngest entry now
    said(core, list(range(17)))
    seen = set()
    for event in log.snapshot().entries:
        assert event.parent is None or event.parent in seen
        seen.add(event.key)
    assert len(seen) == 4


def test_entries_whose_parents_are_gone_are_entries_all_the_same():
    entries = {
        key: CacheEvent("stored", POOL, key, parent) for key, parent in ((b"c", b"b"), (b"b", b"a"), (b"x", None))
    }
    assert [event.key for event in parents_first(entries)] == [b"b", b"c", b"x"]


def test_the_log_keeps_the_last_events_only():
    log = CacheLog(SIZE, history=4)
    for n in range(50):
        log.append([CacheEvent("stored", POOL, bytes([n]))])
    epoch, oldest = log.oldest
    assert log.place == (epoch, 51)
    assert 51 - 8 < oldest <= 51 - 4
    with pytest.raises(TooOld, match="not kept"):
        log.replay(epoch, oldest - 1)
    with pytest.raises(TooOld, match="yet to come"):
        log.replay(epoch, 52)
    assert log.replay(epoch, 51).events == []
    assert [event.key for event in log.replay(epoch, 48, 2).events] == [b"\x2f", b"\x30"]


def test_json_has_all_that_msgpack_has():
    core, log = told_core(with_tokens=True)
    said(core, list(range(9)), salt="s")
    for value in (log.replay(None, 0), log.snapshot()):
        assert from_plain(msgspec.json.decode(msgspec.json.encode(plain(value)))) == value


# ---- the index


def batch_of(log, first, end):
    events = log.replay(None, first, end - first)
    return CacheBatch(events.epoch, first, SIZE, events.events)


def test_an_index_sees_gaps_repeats_and_other_epochs():
    core, log = told_core()
    index = CacheIndex()
    assert index.apply(batch_of(log, 0, 1)) == "snapshot"
    index.load(log.snapshot())
    for n in range(10):
        said(core, [n] * 9)
    end = log.place[1]
    assert index.apply(batch_of(log, 12, end)) == "replay"  # ten and more events were lost
    assert index.sequence == 1
    assert index.apply(CacheBatch(index.epoch, end, SIZE, [])) == "replay"  # also at the end
    assert index.apply(batch_of(log, 1, 14)) == "nothing"
    assert index.apply(batch_of(log, 3, 9)) == "nothing"  # known
    assert index.apply(batch_of(log, 12, end)) == "nothing"
    check(core, log, index)
    old = batch_of(log, 12, end)
    core.kv.reset()
    assert index.apply(CacheBatch(log.epoch, 0, SIZE, [])) == "snapshot"
    index.load(log.snapshot())
    assert index.apply(old) == "nothing"  # late, of an epoch that is over
    check(core, log, index)


def test_an_index_can_stop_at_a_number():
    core, log = told_core()
    index = CacheIndex()
    index.load(log.snapshot())
    said(core, [1] * 17)
    assert index.apply(batch_of(log, 1, 5), upto=3) == "nothing"
    assert index.sequence == 3
    assert index.pages() == set(keys_of(core, [1] * 8))


# ---- over ZMQ


@pytest.fixture
def feed(tmp_path):
    log = CacheLog(SIZE, history=50)
    feed = CacheFeed(log, endpoint=f"ipc://{tmp_path}/public", replay=f"ipc://{tmp_path}/ask", topic="cache@here")
    feed.start()
    yield feed
    feed.close()


def until(subscriber, log):
    """Poll until the index has come to the log's end."""
    deadline = time.monotonic() + 60
    while (subscriber.index.epoch, subscriber.index.sequence) != log.place:
        assert time.monotonic() < deadline
        subscriber.poll(1.0)
    live = log.snapshot()
    assert subscriber.index.pages() == {event.key for event in live.entries}


def stored(log, first, count=1):
    log.append([CacheEvent("stored", POOL, n.to_bytes(4, "big")) for n in range(first, first + count)])


def test_subscribers_follow_late_and_through_losses(feed):
    log = feed.log
    stored(log, 0, 5)
    with CacheSubscriber(feed.public["events"], feed.public["replay"], topic="cache@") as subscriber:
        until(subscriber, log)  # late
        assert (subscriber.snapshots, subscriber.replays) == (1, 0)
        stored(log, 5, 5)
        until(subscriber, log)
        lost = log.replay(None, log.place[1]).sequence
        stored(log, 10, 10)
        while subscriber.index.sequence == lost and subscriber._events.poll(2000):
            subscriber._events.recv_multipart()  # ten events are lost on the way
            if subscriber._events.poll(0) == 0:
                break
        until(subscriber, log)  # the next sign of life shows it
        assert (subscriber.snapshots, subscriber.replays) == (1, 1)
        stored(log, 100, 200)  # more than are kept
        while subscriber._events.poll(500):
            subscriber._events.recv_multipart()
        until(subscriber, log)
        log.clear()
        stored(log, 1000, 3)
        until(subscriber, log)
        assert subscriber.index.pages() == {n.to_bytes(4, "big") for n in range(1000, 1003)}


def test_an_engine_that_starts_anew_at_the_same_place(tmp_path):
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    first = CacheFeed(CacheLog(SIZE), endpoint=events, replay=replay)
    first.start()
    stored(first.log, 0, 5)
    with CacheSubscriber(events, replay) as subscriber:
        until(subscriber, first.log)
        first.close()
        second = CacheFeed(CacheLog(SIZE), endpoint=events, replay=replay)
        second.start()
        try:
            stored(second.log, 7, 2)
            until(subscriber, second.log)
            assert subscriber.snapshots == 2
        finally:
            second.close()


def test_who_reads_nothing_holds_nobody_up(feed):
    context = zmq.Context()
    idle = context.socket(zmq.SUB)
    idle.setsockopt(zmq.RCVHWM, 1)
    idle.setsockopt(zmq.SUBSCRIBE, b"")
    idle.connect(feed.public["events"])
    assert idle.poll(10_000)
    with CacheSubscriber(feed.public["events"], feed.public["replay"]) as subscriber:
        for n in range(3000):
            stored(feed.log, n)
        until(subscriber, feed.log)
    context.destroy(linger=0)


def test_questions_are_answered_in_words(feed):
    context = zmq.Context()
    for kind in (zmq.DEALER, zmq.REQ):
        asking = context.socket(kind)
        asking.connect(feed.public["replay"])
        for question, answer in (
            ([b"what"], b"error"),
            ([b"replay", b"", b"123"], b"error"),
            ([b"replay", b"\xff", b"\0" * 8], b"too old"),
            ([b"replay", b"", b"\xff" * 8], b"too old"),
            ([b"replay", b"", b"\0" * 8], b"batch"),
            ([b"snapshot"], b"snapshot"),
        ):
            asking.send_multipart(question)
            assert asking.poll(10_000)
            kind_of_answer, content = asking.recv_multipart()
            assert kind_of_answer == answer
            assert content
        asking.close()
    assert msgspec.msgpack.decode(content, type=CacheSnapshot).entries == []
    context.destroy(linger=0)


def test_a_place_that_is_taken_is_refused(feed):
    taken = zmq.Context()
    sock = taken.socket(zmq.PUB)
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(ConfigError, match=rf"cache_events: cannot listen on tcp://127.0.0.1:{port}: Address already"):
        assemble(EngineConfig(executor="sim", cache_events=f"tcp://127.0.0.1:{port}"))
    taken.destroy(linger=0)


@pytest.mark.parametrize("value", ["yes", "tcp://x", "tcp://127.0.0.1:0", "http://127.0.0.1:1", "zmq://a:1"])
def test_what_is_no_place_is_refused(value):
    with pytest.raises(ValueError, match="is no endpoint such as"):
        EngineConfig(cache_events=value)


def test_missed_events_are_asked_for_next_door():
    assert next_port("tcp://127.0.0.1:5557") == "tcp://127.0.0.1:5558"
    assert next_port("ipc:///run/cache") == "ipc:///run/cache-replay"


# ---- explain


@both_caches
def test_explain_says_why(kvcache):
    core, _ = told_core(kvcache, num_pages=12, executor=ScriptedModel())
    prompt = list(range(10, 27))

    def why(tokens, **fields):
        found = core.cache.explain(tokens, **fields)
        missing = found["missing"]
        return found["cached_pages"], missing and missing["why"]

    assert why(prompt) == (0, "never")
    core.add(prompt, SamplingParams(max_tokens=1))
    plan = core.plan()
    if kvcache == "paged":
        assert why([*prompt[:4], 1]) == (1, "last")  # planned: whoever comes now shares it
    core.commit(core.executor.execute(plan))
    finish(core)
    assert why(prompt) == (4, "last")
    assert why(prompt[:16]) == (3, "last")  # the last token is computed: its page is not given
    assert why([*prompt[:8], *range(9)]) == (2, "never")
    assert why(prompt, salt="other") == (0, "salt")
    assert why(prompt, adapter="other") == (0, "salt")
    said(core, list(range(100, 141)))
    pages, reason = why(prompt)
    assert pages < 4
    assert reason == "evicted"
    core.cache.flush()
    assert why(list(range(100, 141))) == (0, "flushed")


@both_caches
def test_explain_without_events_knows_less(kvcache):
    core = make_core(kvcache=kvcache, page_size=SIZE)
    said(core, list(range(9)))
    assert core.cache.explain([*range(4), 9, 9, 9, 9, 9])["missing"]["why"] == "unknown"
    assert core.cache.explain(list(range(9)))["cached_tokens"] == 8
    core = make_core(kvcache=kvcache, page_size=SIZE, kvcache_options={"enable_prefix_caching": False})
    said(core, list(range(9)))
    assert core.cache.explain(list(range(9)))["missing"]["why"] == "off"


@both_caches
def test_explain_changes_nothing(kvcache):
    """What was used last longest ago is still the first to go, and no node is cut."""
    core, log = told_core(kvcache, num_pages=12)
    for n in (1, 2):
        said(core, [n] * 17)
    order = [repr(candidate) for candidate in core.kv.candidates()]
    for length in (5, 9, 17):
        core.cache.explain([1] * length)
        core.cache.explain([*[1] * (length - 1), 3])
    assert [repr(candidate) for candidate in core.kv.candidates()] == order
    check(core, log)


def test_a_question_that_nobody_knows():
    with pytest.raises(Exception, match="'weather' cannot be asked of a cache: stats, explain, flush, dump can"):
        make_core().cache.ask("weather", {})


def test_the_hit_rate_is_of_what_was_looked_up():
    core = make_core(page_size=SIZE)
    assert core.cache.stats()["hit_rate"] is None
    said(core, list(range(10)))
    said(core, list(range(10)))
    assert core.cache.stats()["hit_rate"] == pytest.approx(8 / 20)


def test_the_host_tier_is_told_of_exactly():
    """Under pressure in both tiers, and after a flush of both."""
    store = make("connector", "host", {"capacity": "320"})
    core, log = told_core(connectors=[store], executor=ShadowExecutor(), num_pages=16)
    for n in range(12):
        said(core, [n % 5] * 13)
    index = check(core, log)
    there = {key for n in range(5) for key in keys_of(core, [n] * 13) if store.has_many([key])}
    assert index.pages("host") == there
    assert 0 < len(there) < 15
    core.cache.flush(tiers=True)
    core.close()
    late = CacheIndex()
    late.load(log.snapshot())
    assert late.pages("host") == set()
