"""What people who watch an engine are shown: true, bounded, and nothing while nobody looks."""

from __future__ import annotations

import random
from itertools import product

import pytest

from engine.core import EngineError, Outlined, SamplingParams
from engine.core.lens import desk
from engine.core.lens.desk import COUNTED, FIRST, NODES
from engine.core.lens.pages import CELLS, STATES, VISITS, PageMap
from engine.core.lens.steps import LANES, STEPS, Kind, StepLens
from engine.core.serve.messages import DeskAnswer, encode
from engine.testing import make_core

COMBINATIONS = list(product(("unified", "radix"), ("paged", "radix"), (False, True)))


def loaded(scheduler, kvcache, overlap, **more):
    fields = {"num_pages": 120, "page_size": 8, "max_batch_tokens": 128, "max_running": LANES, **more}
    core = make_core(scheduler=scheduler, kvcache=kvcache, overlap=overlap, **fields)
    rnd = random.Random(7)
    heads = [[one] * 40 for one in range(3)]
    for n in range(50):
        tail = [rnd.randrange(9) for _ in range(rnd.randrange(60))]
        core.add(heads[n % 3] + tail, SamplingParams(max_tokens=40, ignore_eos=True), metadata={"tenant": f"t{n % 2}"})
    return core


@pytest.mark.parametrize(("scheduler", "kvcache", "overlap"), COMBINATIONS)
def test_each_step_is_shown_as_it_was_planned(scheduler, kvcache, overlap):
    core = loaded(scheduler, kvcache, overlap)
    core.lens.look()
    last, kinds, again = 0, set(), 0
    while core.has_work:
        core.step()
        core.lens.stepped(0.001)
        stats, look = core.step_stats(), core.lens.look(since=last)
        for step, _, seconds, mode, decode, prefill, repeated, found, rows, _, admitted, *_, cells in look["steps"]:
            last, again = step, again + repeated
            assert (step, seconds, mode, rows, admitted) == (stats.step, 0.001, stats.mode, stats.rows, stats.admitted)
            assert decode + prefill + repeated == stats.tokens == stats.decode_rows + stats.prefill_tokens
            assert decode == stats.decode_rows + stats.draft_tokens
            assert found == stats.cached_tokens
            lanes = [cell[0] for cell in cells if cell[2] != Kind.PREEMPTED]
            assert len(set(lanes)) == len(lanes) == rows  # there are as many lanes as may run
            assert all(look["names"][cell[1]][1] in ("t0", "t1") for cell in cells)
            kinds |= {cell[2] for cell in cells}
        numbers, found = core.kv.numbers(), look["pages"]
        free, cached, *used = map(sum, found["cells"])
        assert (free, cached, sum(used)) == (numbers.free, numbers.evictable, numbers.pinned)
        tree = look["tree"]
        assert (tree is not None) == (kvcache == "radix")
        if tree and len(tree) < NODES and max(node[4] for node in tree) < 12:
            assert sum(node[2] for node in tree) >= numbers.evictable
    assert {Kind.DECODE, Kind.HIT} <= kinds
    assert (again > 0) == (core.counters.recomputed_tokens > 0)
    assert again <= core.counters.recomputed_tokens


def test_tokens_that_are_computed_again_are_told_apart_from_new_ones():
    core = make_core(num_pages=8, page_size=4, max_batch_tokens=64, max_running=2, kvcache="paged")
    core.add([1] * 9, SamplingParams(max_tokens=20, ignore_eos=True))
    core.add([2] * 9, SamplingParams(max_tokens=20, ignore_eos=True))
    core.lens.look()
    seen = []
    while core.has_work:
        core.step()
        core.lens.stepped(0.0)
        seen += core.lens.look(since=seen[-1][0] if seen else 0)["steps"]
    lost = [cell[3] for one in seen for cell in one[-1] if cell[2] == Kind.PREEMPTED]
    assert sum(lost) == core.counters.recomputed_tokens > 0
    assert 0 < sum(one[6] for one in seen) <= sum(lost)  # less what the cache still had


def test_what_is_shown_is_bounded_whatever_there_is():
    core = make_core(num_pages=100_000, page_size=2, max_batch_tokens=2048, max_running=64, kvcache="radix")
    for n in range(1000):
        params, name = SamplingParams(max_tokens=300, ignore_eos=True), {"tenant": "x" * 5000}
        core.add([n % 900] * 20 + [n // 900, n % 900], params, metadata=name)
    for number in range(STEPS + 40):
        if number % 20 == 0:
            core.lens.look()
        core.step()
        core.lens.stepped(0.0)
    for _ in range(4 * 100_000 // VISITS):
        look = core.lens.look()
    assert len(encode(DeskAnswer(1, look))) < 60_000
    assert len(look["steps"]) == STEPS
    assert all(len(one[-1]) <= 2 * LANES for one in look["steps"])
    assert len(look["queue"]["first"]) == FIRST
    assert sum(look["queue"]["reasons"].values()) == COUNTED
    assert look["queue"]["beyond"] == look["queue"]["length"] - COUNTED > 0
    assert len(look["tree"]) <= NODES
    assert len(look["pages"]["cells"]) == len(STATES)
    assert all(len(state) <= CELLS for state in look["pages"]["cells"])
    assert sum(map(sum, look["pages"]["cells"])) == 100_000


def test_a_large_pool_is_walked_in_slices():
    core = make_core(num_pages=4 * VISITS + 5, page_size=1)
    walk = PageMap(core)
    looks = [walk.look() for _ in range(5)]
    assert looks[:4] == [None] * 4
    assert looks[4]["pages"] == -(-core.pool.num_pages // CELLS)
    assert [sum(state) for state in looks[4]["cells"]] == [core.pool.num_pages, 0, 0, 0, 0]
    assert walk.look() == looks[4]  # until the next walk has ended


def test_nothing_of_what_was_said_is_shown():
    core = make_core(kvcache="radix", page_size=4)
    core.add([731] * 21, SamplingParams(max_tokens=3, stop=("sesame",)), salt="cellar", metadata={"user": "poppy"})
    core.lens.look()
    core.step()
    core.lens.stepped(0.0)
    told = repr(core.lens.look())
    assert "731, 731" not in told
    assert not any(word in told for word in ("sesame", "cellar", "poppy"))


def test_nobody_looks_any_more_when_looks_stay_out(monkeypatch):
    core = make_core()
    core.add([1] * 9, SamplingParams(max_tokens=4, ignore_eos=True))
    assert core.lens.ask("about", {}) == {"tree": False, "open": False}
    core.lens.ask("look", {})
    core.step()
    core.lens.stepped(0.0)
    assert len(core.lens.steps.seen) == 1
    monkeypatch.setattr(desk.time, "monotonic", lambda: 1e12)
    core.lens.stepped(0.0)
    assert core.lens.steps is None
    core.lens.ask("look", {})
    assert core.lens.ask("close", {}) == {}
    assert core.lens.ask("close", {}) == {}
    assert core.lens.steps is None
    with pytest.raises(EngineError, match="'stare' cannot be asked of a lens"):
        core.lens.ask("stare", {})


def test_lanes_are_given_to_the_next_when_their_requests_end():
    core = make_core(num_pages=4000, page_size=4, max_batch_tokens=512, max_running=LANES + 8)
    for n in range(3 * LANES):
        core.add([n] * 5, SamplingParams(max_tokens=2 + n % 5, ignore_eos=True))
    core.lens.look()
    numbers = set()
    while core.has_work:
        core.step()
        core.lens.stepped(0.0)
        one = core.lens.steps.seen[-1]
        assert len({cell[0] for cell in one.cells}) == len(one.cells) <= LANES
        numbers |= {cell[1] for cell in one.cells}
    assert len(numbers) > 2 * LANES
    assert isinstance(core.lens.steps, StepLens)
    core.lens.look()
    assert set(core.lens.steps.names) == {cell[1] for one in core.lens.steps.seen for cell in one.cells}


def test_the_outline_of_a_tree_tells_of_each_node_that_it_shows():
    core = make_core(kvcache="radix", page_size=2, num_pages=400)
    for n in range(40):
        core.add([1] * 8 + [n + 2] * 6, SamplingParams(max_tokens=1))
        while core.has_work:
            core.step()
    nodes = core.kv.outline(9)
    assert nodes[0] == Outlined(-1, 8, 4, 0, 40, nodes[0].used)
    assert len(nodes) == 9
    assert {node.parent for node in nodes[1:]} == {0}
    assert [node.used for node in nodes[1:]] == sorted((node.used for node in nodes[1:]), reverse=True)  # newest first
    assert len(core.kv.outline(1)) == 1
