"""The admission ledger: budgets on both sides of a pin, and memories that the core knows nothing of."""

from __future__ import annotations

import pytest

from engine.core import Request, SamplingParams, Why
from engine.core.plan import Room
from engine.plugins.schedulers._radix_ledger import Ledger
from engine.plugins.schedulers.radix import RadixScheduler
from engine.testing import ScriptedExecutor, make_core


def request(name="r", length=10, new=10, *, output=0, priority=0, entry=0, ignore_eos=False) -> Request:
    return Request(
        id=name,
        tokens=[0] * (length + output),
        num_prompt=length,
        params=SamplingParams(ignore_eos=ignore_eos),
        max_total=length + new,
        priority=priority,
        entry_index=entry,
    )


def ledger(available=100, running=(), **kwargs) -> Ledger:
    settings = {"page_size": 1, "pool_tokens": 1000, "ratio": 0.5, "input_tokens": 1000, **kwargs}
    return Ledger(available=lambda: available, running=running, **settings)


def room(owed, hit=0, idle=0, size=1) -> Room:
    return Room(hit, owed, 0, idle, size)


def test_a_prefix_is_counted_before_and_after_it_is_pinned():
    book = ledger(available=50)
    candidate = request(length=40, new=10)
    assert book.decide(candidate, room(owed=20, hit=20, idle=18)) == 20
    assert book.decide(candidate, room(owed=20, hit=20, idle=19)) is Why.RESERVE
    assert ledger(available=31).decide(candidate, room(owed=20, hit=20)) is Why.RESERVE, "strictly less"


def test_what_joins_is_charged_in_pages_with_its_whole_output():
    book = ledger(available=200, page_size=4, chunk_tokens=32, ratio=1.0, running=[request(new=10, output=4)])
    assert book.total.remaining == 194
    candidate = request(length=21, new=8)
    assert book.decide(candidate, room(owed=21)) == 21
    book.charge(candidate, 21, whole=True)
    assert book.total.remaining == 194 - 24 - 8 - 4
    assert book.current.remaining == 200 - 24 - 4
    assert (book.input_left, book.chunk_left) == (976, 8)
    assert book.decide(request(length=30), room(owed=30)) == 8, "cut to whole pages"


@pytest.mark.parametrize(
    ("threshold", "owed", "chosen"),
    [(10, 0, ["low1", "low2"]), (10, 60, []), (25, 0, []), (0, 10, ["low1", "middle", "low2"])],
)
def test_victims_are_less_urgent_by_more_than_the_threshold_and_together_enough(threshold, owed, chosen):
    running = [
        request("low1", new=60, priority=0, entry=1),
        request("middle", new=60, priority=-10, entry=2),
        request("low2", new=60, priority=0, entry=3),
        request("high", new=60, priority=-40, entry=4),
    ]
    book = ledger(available=80, running=running)
    victims = book.victims(request("urgent", new=20, priority=-20), owed, threshold)
    assert [victim.id for victim in victims] == chosen
    before = book.total.remaining
    for victim in victims:
        book.forgive(victim)
    assert book.total.remaining == before + 30 * len(victims)


def test_a_simulated_future_counts_what_those_that_end_give_back():
    running = [request("old", length=40, new=12, output=10)]
    book = ledger(available=60, running=running, simulate=True, ratio=1.0)
    assert book.decide(request(length=10, new=60, ignore_eos=True), room(owed=10)) == 10, "the old one ends soon"
    assert book.decide(request(length=10, new=99, ignore_eos=True), room(owed=10)) is Why.RESERVE


class Slots:
    """As many recurrent states as there are slots; a request holds one for its whole life."""

    def __init__(self, free: int) -> None:
        self.free = free

    def remaining(self) -> float:
        return self.free

    def need(self, request: Request, tokens: int) -> float:
        return 1

    def charge(self, request: Request, tokens: int) -> None:
        self.free -= 1


class Recurrent(RadixScheduler):
    """A scheduler for a model with three recurrent states."""

    name = "recurrent"

    def resources(self, step):
        return [Slots(3 - len(step.running))]


def test_one_more_memory_is_one_more_resource():
    core = make_core(
        scheduler=Recurrent(), kvcache="radix", executor=ScriptedExecutor(), num_pages=200, max_batch_tokens=256
    )
    for number in range(7):
        core.add([number] * 5, SamplingParams(max_tokens=3 + number), request_id=f"r{number}")
    most = 0
    while core.has_work:
        core.step()
        most = max(most, len(core.running))
        if core.waiting and len(core.running) == 3:
            assert core.why(core.waiting.head().id)[0] in (Why.RESERVE, Why.NOT_ASKED, Why.BEHIND)
    assert most == 3
    assert core.counters.flat()["finished_length"] == 7


def test_a_window_bounds_what_a_prompt_charges():
    class Window(Slots):
        def need(self, request, tokens):
            return min(tokens, 8)

        def charge(self, request, tokens):
            self.free -= min(tokens, 8)

    window = Window(20)
    book = ledger(available=500, resources=[window])
    for free in (12, 4):
        candidate = request(length=40)
        assert book.decide(candidate, room(owed=40)) == 40
        book.charge(candidate, 40, whole=True)
        assert window.free == free
    assert book.decide(request(length=40), room(owed=40)) is Why.RESERVE
    assert book.decide(request(length=3), room(owed=3)) == 3
