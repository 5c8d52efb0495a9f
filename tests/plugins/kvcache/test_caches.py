"""Both caches against a plain model of what a prefix cache may and must remember."""

from __future__ import annotations

import pytest

from engine.core import Policy, SamplingParams, hookimpl
from engine.testing import ScriptedExecutor, make_core

both = pytest.mark.parametrize("kvcache", ["paged", "radix"])


def engine(kvcache, **kwargs):
    return make_core(kvcache=kvcache, executor=ScriptedExecutor(lambda request: 900), **kwargs)


def finish(core, tokens, new=1, **kwargs):
    request = core.add(tokens, SamplingParams(max_tokens=new), **kwargs)
    while core.has_work:
        core.step()
    return request


@both
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_the_longest_common_prefix_in_whole_pages_is_found(kvcache, page_size):
    core = engine(kvcache, page_size=page_size, num_pages=600 // page_size, max_batch_tokens=256)
    base = list(range(100))
    finish(core, base)
    for turn, common in enumerate((0, 1, page_size, 2 * page_size + 1, 50, 99, 100)):
        probe = base[:common] + [700 + turn] * 5
        request = finish(core, probe)
        assert request.cached_tokens == common // page_size * page_size, common


@both
def test_output_is_cached_too_but_not_its_last_token(kvcache):
    core = engine(kvcache, page_size=4, max_batch_tokens=64)
    first = finish(core, list(range(6)), new=7)  # 6 + 7 tokens, KV of 12
    follow = finish(core, [*first.tokens, 5])
    assert follow.cached_tokens == 12


@both
def test_namespaces_never_meet(kvcache):
    core = engine(kvcache, num_pages=400, max_batch_tokens=64)
    prompt = list(range(20))
    identities = [
        {}, {"salt": "A"}, {"adapter": "A"}, {"salt": "A", "adapter": "A"}, {"salt": "AA"}, {"adapter": "AA"},
        {"salt": ";adapter:1:A"},
    ]  # fmt: skip
    for identity in identities:
        assert finish(core, prompt, **identity).cached_tokens == 0, identity
    for identity in identities:
        assert finish(core, prompt, **identity).cached_tokens == 16, identity
    assert finish(core, prompt, salt="").cached_tokens == 16, "an empty salt is none"


@both
def test_the_least_recently_used_prefix_goes_first(kvcache):
    core = engine(kvcache, num_pages=12, page_size=4, max_batch_tokens=64)
    old, new = list(range(100, 117)), list(range(200, 217))
    finish(core, old)
    finish(core, new)
    assert finish(core, old).cached_tokens == 16
    finish(core, list(range(300, 317)))
    assert finish(core, old).cached_tokens == 16
    assert finish(core, new).cached_tokens < 16


@both
def test_pages_in_use_are_never_evicted(kvcache):
    core = engine(kvcache, num_pages=8, page_size=4, max_batch_tokens=64, max_running=2)
    request = core.add(list(range(12)), SamplingParams(max_tokens=8), request_id="a")
    core.step()
    pages = list(request.pages)
    core.kv.reset()
    assert core.kv.drop([candidate.key for candidate in core.kv.candidates()]) == 0
    core.check()
    assert request.pages[: len(pages)] == pages


@both
def test_without_prefix_caching_nothing_is_kept(kvcache):
    core = engine(kvcache, kvcache_options={"enable_prefix_caching": False})
    for _ in range(2):
        assert finish(core, list(range(20)), new=9).cached_tokens == 0
    assert core.pool.num_free == core.pool.num_pages


def test_the_tree_keeps_one_copy_of_equal_content():
    core = engine("radix", num_pages=64, page_size=4, max_batch_tokens=64)
    for name in "abc":
        core.add(list(range(17)), SamplingParams(max_tokens=6), request_id=name)
    core.step()
    assert core.kv.numbers().pinned == 4 + 3  # one shared path, and one private page each
    tables = [request.pages[:4] for request in core.running]
    assert tables[0] == tables[1] == tables[2]
    while core.has_work:
        core.step()


def test_the_chain_keeps_copies_and_hits_the_oldest():
    core = engine("paged", num_pages=64, page_size=4, max_batch_tokens=64)
    a = core.add(list(range(8)), SamplingParams(max_tokens=3), request_id="a")
    b = core.add(list(range(8)), SamplingParams(max_tokens=3), request_id="b")
    core.step()
    assert a.pages[0] == b.pages[0], "the first page was published when planned"
    assert a.pages[1] != b.pages[1], "the last token is always computed, so its page is never shared in one step"
    while core.has_work:
        core.step()
    third = core.add([*range(8), 1], SamplingParams(max_tokens=1))
    core.step()
    assert third.cached_tokens == 8


def test_digests_do_not_depend_on_the_process():
    import subprocess
    import sys

    code = (
        "from engine.core.identity import namespace_digest, pack, page_digests;"
        "print(page_digests(namespace_digest('m', 'a', 's'), pack([1, 2, 49151]), 3)[0].hex())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


@both
def test_what_a_step_evicts_for_its_decodes_is_asked_for_at_once(kvcache):
    class Asked(Policy):
        name = "asked"

        def __init__(self):
            super().__init__()
            self.needs = []

        @hookimpl
        def evict(self, need, pool):
            if pool.kind == "cache":
                self.needs.append(need)

    asked = Asked()
    core = engine(kvcache, policies=[asked], num_pages=16, page_size=4)
    for first in (100, 200, 300, 400):  # their pages stay, idle
        finish(core, list(range(first, first + 12)))
    rows = [core.add([1, 2, 3, number], SamplingParams(max_tokens=3)) for number in range(4)]
    core.step()
    asked.needs.clear()
    evicted = core.counters.evicted_pages
    core.step()  # each begins its second page
    assert [len(request.pages) for request in rows] == [2] * 4
    assert asked.needs == [4]
    assert core.counters.evicted_pages - evicted == {"paged": 4, "radix": 6}[kvcache], "the tree gives whole leaves"
