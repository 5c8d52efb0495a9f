"""``multi``: each policy by what it does, faults in each tier, and text that is the cold run's."""

from __future__ import annotations

import time

import pytest

from engine.core import ConfigError, EngineConfig, SamplingParams, assemble
from engine.core.plan import Transfer
from engine.core.registry import make
from engine.plugins.connectors._frames import HEADER
from engine.plugins.connectors.file import FileStore
from engine.plugins.connectors.host import HostStore
from engine.plugins.connectors.multi import MultiStore
from engine.testing import ShadowExecutor, make_core

PROMPT = [at % 97 for at in range(30)]


@pytest.fixture
def tiers(opened, tmp_path):
    """Opens a multi over a host and a file store (or the stores that are given): all of them."""

    def make(layout, stores=None, *, host=(), **options):
        if stores is None:
            file = FileStore(FileStore.Options(root=str(tmp_path / "tier")))
            stores = [HostStore(HostStore.Options(**dict(host))), file]
        multi = MultiStore(MultiStore.Options(**options))
        assert list(multi.compose(stores)) == stores
        opened(multi, layout)
        return multi, *stores

    return make


def has(store, keys):
    """Which of the keys it has."""
    return [store.has_many([key]) for key in keys]


class Slow(HostStore):
    """A server far away: every page takes its time, or never comes."""

    name = "slow"
    remote = True

    def __init__(self, options=None, seconds=0.0):
        super().__init__(options)
        self.seconds = seconds
        self.asked = 0

    def get_many(self, keys):
        self.asked += 1
        time.sleep(self.seconds * len(keys))
        return super().get_many(keys)


def test_write_through_gives_every_page_to_every_tier(tiers, memory, key, ask):
    multi, host, file = tiers(memory())
    keys = [key(number) for number in range(4)]
    assert ask(multi, "push", keys, range(4)).kind == "done"
    assert (has(host, keys), has(file, keys)) == ([1] * 4, [1] * 4)
    numbers = multi.stats()
    assert (numbers["kept"], numbers["host_kept"], numbers["file_kept"]) == (4, 4, 4)


def test_selective_gives_a_lower_tier_what_was_used_so_often(tiers, memory, key, ask, eventually):
    multi, host, file = tiers(memory(), write="selective", selective_after=3)
    keys = [key(number) for number in range(4)]
    ask(multi, "push", keys, range(4))
    ask(multi, "push", keys[:2], range(2))
    assert (has(host, keys), has(file, keys)) == ([1] * 4, [0] * 4)
    ask(multi, "push", keys[:1], [0])
    assert has(file, keys) == [1, 0, 0, 0], "offered three times"
    ask(multi, "pull", keys[:2], [6, 7])
    eventually(lambda: has(file, keys) == [1, 1, 0, 0])  # offered twice, and loaded


def test_write_back_gives_a_lower_tier_what_the_one_above_evicts(tiers, memory, key, ask):
    layout = memory()
    multi, host, file = tiers(layout, write="write-back", host={"capacity": str(2 * layout.page_bytes)})
    keys = [key(number) for number in range(4)]
    ask(multi, "push", keys[:2], range(2))
    assert has(file, keys) == [0] * 4
    ask(multi, "push", keys[2:], [2, 3])
    assert (has(host, keys), has(file, keys)) == ([0, 0, 1, 1], [1, 1, 0, 0])
    assert ask(multi, "probe", keys).tokens == 16, "in both together"
    before = [layout.read(page) for page in range(4)]
    assert ask(multi, "pull", keys, range(6, 10)).kind == "done"
    assert all((layout.read(6 + at) == before[at]).all() for at in range(4))


def test_write_back_through_three_tiers(tiers, memory, key, ask, tmp_path):
    """What the file tier evicts is read once more, and checked, for the one below."""
    layout = memory()
    sizes = {"capacity": str(layout.page_bytes)}
    file = FileStore(FileStore.Options(root=str(tmp_path), capacity=str(layout.page_bytes + HEADER.size)))
    stores = [HostStore(HostStore.Options(**sizes)), file, Slow()]
    multi, _, _, last = tiers(layout, stores, write="write-back")
    keys = [key(number) for number in range(3)]
    for at, each in enumerate(keys):
        ask(multi, "push", [each], [at])
    assert [has(one, keys) for one in stores] == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert (last.get_many(keys[:1])[0] == layout.read(0)).all()


@pytest.mark.parametrize("promote", [True, False])
def test_each_page_comes_from_the_uppermost_tier_and_goes_up(promote, tiers, memory, key, ask, eventually):
    layout = memory()
    multi, host, file = tiers(layout, promote=promote)
    keys = [key(number) for number in range(6)]
    before = [layout.read(page) for page in range(6)]
    for at in range(6):
        store = file if at in (1, 2, 4) else host
        store.put_many([keys[at]], [before[at]])
    assert ask(multi, "probe", keys).tokens == 24
    assert ask(multi, "pull", keys, range(6, 12)).kind == "done"
    assert all((layout.read(6 + at) == before[at]).all() for at in range(6))
    assert (host.hits, file.hits) == (3, 3)
    if promote:
        eventually(lambda: has(host, keys) == [1] * 6)
    ask(multi, "pull", keys, range(6, 12))
    assert file.hits == (3 if promote else 6)


def test_best_effort_takes_what_is_in_the_first_tier_and_fetches_the_rest_for_the_next(
    tiers, memory, key, ask, eventually
):
    layout = memory()
    multi, host, slow = tiers(layout, [HostStore(), Slow(seconds=0.01)], prefetch="best-effort")
    keys = [key(number) for number in range(6)]
    contents = [layout.read(page) for page in range(6)]
    host.put_many(keys[:2], contents[:2])
    slow.put_many(keys, contents)
    (event,) = multi.transfer_kv([Transfer("p", "probe", "r", keys=tuple(keys))])
    assert event.tokens == 8, "answered at once"
    eventually(lambda: has(host, keys) == [1] * 6)
    assert ask(multi, "probe", keys).tokens == 24
    assert multi.stats()["copied"] == 4


def test_wait_waits_for_all_of_it(tiers, memory, key, ask):
    layout = memory()
    multi, _, slow = tiers(layout, [HostStore(), Slow(seconds=0.02)], prefetch="wait")
    keys = [key(number) for number in range(6)]
    slow.put_many(keys, [layout.read(page) for page in range(6)])
    assert ask(multi, "probe", keys).tokens == 24
    assert ask(multi, "pull", keys, range(6, 12)).kind == "done"


def test_timeout_takes_what_has_come_by_then_and_that_is_no_fault(tiers, memory, key, ask):
    layout = memory()
    options = {"prefetch": "timeout", "timeout_base": 0.2, "timeout_per_token": 0.0}
    slow = Slow(seconds=0.05)
    multi, host, slow = tiers(layout, [HostStore(), slow], **options)
    multi._slice = 1
    keys = [key(number) for number in range(6)]
    contents = [layout.read(page) for page in range(6)]
    slow.put_many(keys, contents)
    slow.seconds = 0.0
    assert ask(multi, "pull", keys, range(6, 12)).failed_pages == (), "in time"
    for each in list(host._pages):
        del host._pages[each]
    slow.seconds = 0.08
    event = ask(multi, "pull", keys, range(6, 12))
    assert event.kind == "done"
    assert 1 <= len(event.failed_pages) <= 5
    assert event.failed_pages == tuple(range(12 - len(event.failed_pages), 12))


@pytest.mark.parametrize("prefetch", ["best-effort", "wait", "timeout"])
def test_a_tier_that_never_answers_holds_nobody_up_for_longer_than_patience(prefetch, memory, answer):
    """The engine computes what the slow tier does not bring."""
    slow = Slow()
    options = {"prefetch": prefetch, "patience": 0.4, "timeout_base": 0.1, "timeout_per_token": 0.0}
    multi = MultiStore(MultiStore.Options(**options))
    core = make_core(connectors=[multi, HostStore(), slow], executor=ShadowExecutor())
    cold = answer(core)
    multi._tiers[0].store.forget_all()
    slow.seconds = 0.3
    assert answer(core)[0] == cold[0]
    core.close()


def damage(how, *folders):
    """Do it to every page in tiers of files."""
    for path in [path for folder in folders for path in folder.rglob("*") if path.is_file()]:
        data = path.read_bytes()
        if how == "corrupted":
            data = data[:-1] + bytes([data[-1] ^ 255])
        elif how == "of another layout":
            data = data[:16] + b"f" * 32 + data[48:]
        path.write_bytes({"truncated": data[:-1], "empty": b""}.get(how, data))


@pytest.mark.parametrize("how", ["corrupted", "truncated", "of another layout", "empty"])
def test_a_damaged_page_comes_from_the_tier_below_or_is_computed(how, tmp_path, answer):
    """A tier of files over another: the upper is damaged, or both."""
    roots = [tmp_path / "upper", tmp_path / "lower"]
    for damaged in (roots[:1], roots):
        stores = [FileStore(FileStore.Options(root=str(root))) for root in roots]
        core = make_core(connectors=[MultiStore(), *stores], executor=ShadowExecutor())
        prompt = [len(damaged), *PROMPT]
        cold = answer(core, prompt)
        assert answer(core, prompt) == (cold[0], 28)
        damage(how, *damaged)
        assert answer(core, prompt) == (cold[0], 28 if damaged == roots[:1] else 0)
        numbers = core.stats()
        assert numbers["connector_multi_file_errors"] > 0
        assert core.counters.failed_loads == (damaged == roots)
        assert (numbers["connector_multi_file-2_errors"] > 0) == (damaged == roots)
        assert answer(core, prompt) == (cold[0], 28), "it was saved again"
        core.close()


def test_a_tier_that_is_full_is_a_failed_save_and_the_others_have_it(tiers, memory, key, ask, monkeypatch):
    """Stands for the disk: the moment at which the written file is to take its place."""

    def full(self, target):
        raise OSError(28, "No space left on device")

    multi, host, _ = tiers(memory())
    monkeypatch.setattr("pathlib.Path.replace", full)
    event = ask(multi, "push", [key(0)], [0])
    assert (event.kind, "file: OSError" in event.reason, "No space left" in event.reason) == ("failed", True, True)
    assert has(host, [key(0)]) == [1]
    assert ask(multi, "pull", [key(0)], [7]).kind == "done"


def test_a_tier_that_fails_does_not_end_what_the_others_are_still_to_get(opened, memory, key, ask):
    """Its pages are saved slice by slice: one tier's failure in the first is no reason to leave out the rest."""

    class Broken(HostStore):
        name = "broken"
        remote = True

        def put_many(self, keys, contents):
            raise ConnectionError("the line is down")

    class InSlices(MultiStore):
        slice_bytes = 1

    host, multi = HostStore(), InSlices()
    multi.compose([host, Broken()])
    opened(multi, memory())
    keys = [key(at) for at in range(4)]
    event = ask(multi, "push", keys, range(4))
    assert (event.kind, "broken: " in event.reason, "the line is down" in event.reason) == ("failed", True, True)
    assert has(host, keys) == [1, 1, 1, 1]
    assert (multi.kept, host.kept) == (4, 4)


def test_a_tier_that_is_gone_costs_what_only_it_had(redis_server, answer):
    """``host`` over ``redis``: killed, it is left alone; what the memory has is loaded as before."""
    redis = make("connector", "redis", {"url": redis_server.url})
    core = make_core(connectors=[MultiStore(), HostStore(), redis], executor=ShadowExecutor(), num_pages=40)
    cold = answer(core)
    redis_server.stop()
    assert answer(core) == (cold[0], 28)
    other = answer(core, [5, *PROMPT])
    assert answer(core, [5, *PROMPT]) == (other[0], 28)
    assert core.stats()["connector_multi_redis_outages"] >= 1
    assert core.counters.flat()["finished_error"] == 0
    core.close()


def test_what_is_told_of_a_page_goes_from_its_first_tier_to_its_last(memory, key, ask, tmp_path, opened):
    layout = memory()
    multi = MultiStore()
    heard = []
    multi.notice = lambda kind, keys: heard.extend((kind, int.from_bytes(one, "big")) for one in keys)
    host = HostStore(HostStore.Options(capacity=str(2 * layout.page_bytes)))
    multi.compose([host, FileStore(FileStore.Options(root=str(tmp_path)))])
    opened(multi, layout)
    for at in range(4):
        ask(multi, "push", [key(at)], [at])
    assert heard == [("stored", at) for at in range(4)], "evicted above, kept below"
    heard.clear()
    assert multi.clear() == 6
    assert sorted(heard) == [("removed", at) for at in range(4)]


def test_a_slow_tier_is_not_loaded_from_and_a_fast_one_is(memory):
    """The clock goes by what is done: a step takes 0.1 s; a page of the lower tier would take a second."""
    now = [0.0]
    slow = Slow()
    multi = MultiStore()
    core = make_core(
        connectors=[multi, HostStore(), slow],
        executor=ShadowExecutor(),
        clock=lambda: now[0],
        num_pages=60,
        max_batch_tokens=16,
    )
    prompts = [[number, *PROMPT] for number in range(4)]
    for prompt in (*prompts, *prompts):
        request = core.add(prompt, SamplingParams(max_tokens=3))
        while core.has_work:
            core.step()
            now[0] += 0.1
        core.kv.reset()
    assert request.cached_tokens == 28, "memory is fast"
    lower = multi._tiers[1]
    lower.pace.add(1, 1.0)
    multi._tiers[0].store.forget_all()
    before = slow.hits
    request = core.add(prompts[0], SamplingParams(max_tokens=3))
    while core.has_work:
        core.step()
    assert (slow.hits, request.cached_tokens) == (before, 0)
    assert core.counters.slow_loads == 1
    assert core.stats()["connector_multi_slow_load_seconds_per_page"] == 1.0
    assert core.stats()["computing_seconds_per_token"] > 0
    core.close()


def test_a_restart_through_multi_is_warm(tmp_path, answer):
    config = EngineConfig(
        executor="sim",
        connectors=["multi", {"name": "host", "capacity": "1MiB"}, {"name": "file", "root": str(tmp_path)}],
        page_size=4,
    )
    for cached in (0, 28):
        core = assemble(config)
        assert core.describe()["connectors"] == {"multi": {"tiers": ["host", "file"]}}
        assert answer(core)[1] == cached
        core.close()


def test_what_cannot_be_composed_is_refused(tmp_path):
    def refused(connectors, words):
        with pytest.raises(ConfigError, match=words):
            assemble(EngineConfig(executor="sim", connectors=connectors))

    refused(["multi"], "connector multi has no tiers: select stores beside it, e.g. --connector multi,host,file")
    refused(
        [{"name": "multi", "tiers": ["hots"]}, "host"], "no store 'hots' is selected beside it: did you mean 'host'"
    )
    refused(["multi", "multi", "host"], "connector 'host' is part of two others")


def test_a_store_that_is_no_tier_stays_on_its_own(tmp_path, answer):
    connectors = [{"name": "multi", "tiers": "host"}, "host", {"name": "file", "root": str(tmp_path)}]
    core = assemble(EngineConfig(executor="sim", connectors=connectors, page_size=4))
    assert set(core.describe()["connectors"]) == {"multi", "file"}
    answer(core)
    assert core.stats()["connector_file_kept"] == core.stats()["connector_multi_kept"] > 0
    core.close()


@pytest.mark.model
def test_a_real_model_says_the_same_whatever_happens_to_its_tiers(tmp_path):
    """Cold; from memory; after a restart from files; with files that are damaged."""
    from engine.core.models.source import resolve
    from engine.core.models.tokenizer import load_tokenizer

    tokens = load_tokenizer(resolve("default")).encode("The quick brown fox jumps over the lazy dog. " * 8)
    whole = (len(tokens) - 1) // 16 * 16
    stores = ["multi", "host", {"name": "file", "root": str(tmp_path)}]

    def run(core, salt):
        core.kv.reset()
        request = core.add(tokens, SamplingParams(max_tokens=6, temperature=0.0), salt=salt)
        while core.has_work:
            core.step()
        return list(request.output), request.cached_tokens

    core = assemble(EngineConfig(connectors=stores, num_pages=64))
    multi = next(plugin for plugin in core._plugins if plugin.name == "multi")
    expected, _ = run(core, "cold")
    assert run(core, "cold") == (expected, whole)
    for number, how in enumerate(("corrupted", "truncated", "of another layout"), 1):
        assert run(core, how) == (expected, 0)
        multi._tiers[0].store.forget_all()
        damage(how, tmp_path)
        assert run(core, how) == (expected, 0)
        assert core.counters.failed_loads == number
    assert run(core, "kept") == (expected, 0)
    core.close()
    core = assemble(EngineConfig(connectors=stores, num_pages=64))
    assert run(core, "kept") == (expected, whole)
    core.close()
