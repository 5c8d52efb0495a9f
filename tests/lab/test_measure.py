"""``measure``: a workload on a real engine, in an open loop."""

from __future__ import annotations

import asyncio

import pytest

from engine import LLM, AsyncEngine, ConfigError, EngineConfig
from engine.lab import SLO, Answer, Arrival, Piece, Target, Workload, drive, measure, simulate, workload
from engine.lab.arrivals import tokens_of

SIM = {"executor": {"name": "sim", "step_ms": 2}, "page_size": 4, "scheduler": "radix", "kvcache": "radix"}
TALK = "conversations:rate=20,sessions=3,turns=2-3,prompt=30,output=6,pause=0.02,system=40"


@pytest.fixture(scope="module")
def engine():
    started = AsyncEngine.launch(EngineConfig.model_validate(SIM), in_process=True)
    yield started
    started.shutdown()


@pytest.fixture(params=["stepped", "alone"])
def either(request, engine):
    if request.param == "alone":
        yield engine
    else:
        with LLM(**SIM) as llm:
            yield llm


def test_every_request_is_answered_and_timed(either):
    made = workload("poisson:rate=100,requests=30,prompt=20-60,output=3-9")
    results = measure(either, made, warm_up=2)
    assert sorted(one.id for one in results.requests) == sorted(one.id for one in made)
    for one in results.requests:
        asked = next(other for other in made if other.id == one.id)
        assert (one.prompt, one.output, one.finish) == (asked.new_tokens, asked.output, "length")
        assert one.arrival == pytest.approx(asked.at), "counted from when it was due"
        assert 0 < one.ttft <= one.e2e
        assert 0 <= one.queue <= one.ttft
    summary = results.summary(SLO.parse("e2e=100"))
    assert summary["slo"]["kept"] == 30
    assert summary["steps"] > 0
    assert 0 < summary["busy_share"] <= 1
    assert summary["client"]["most_open"] >= 1
    assert {plugin["name"] for plugin in results.about["plugins"]} >= {"radix", "sim"}


def test_turns_follow_real_answers(either):
    made = workload(TALK)
    results = measure(either, made)
    found = {one.id: one for one in results.requests}
    for one in made:
        assert found[one.id].answered
        if one.continues:
            before = found[one.continues]
            assert found[one.id].prompt == before.prompt + before.output + one.new_tokens
            assert found[one.id].cached >= 4 * ((before.prompt + before.output - 1) // 4), "answers were in the prompt"
            assert found[one.id].arrival >= before.arrival + before.e2e + one.at - 1e-6


def test_the_same_tokens_as_the_simulation(either):
    """What is found in the cache says that the same prompts were made."""
    made = workload("constant:rate=200,requests=12,prefix=40,prefixes=2,prompt=8,output=2")
    simulated = simulate(EngineConfig.model_validate({**SIM, "executor": "torch"}), made)
    cached = {one.id: one.cached for one in simulated.requests}
    real = {one.id: one.cached for one in measure(either, made).requests}
    assert sum(cached.values()) > 0
    assert sum(real.values()) > 0
    assert {len(tokens_of(one.prompt, 1000)) for one in made} == {48}


def test_what_the_engine_refuses_is_told_and_skips_what_follows(either):
    made = Workload([
        Arrival("long", 0.0, (Piece(1, 9000),), 5),
        Arrival("next", 0.0, (Piece(2, 5),), 5, after=("long",), continues="long"),
        Arrival("last", 0.0, (Piece(3, 5),), 5, after=("next",)),
        Arrival("fine", 0.0, (Piece(4, 5),), 5),
    ])  # fmt: skip
    found = {one.id: one for one in measure(either, made).requests}
    assert [found[name].finish for name in ("long", "next", "last", "fine")] == [
        "refused",
        "skipped",
        "skipped",
        "length",
    ]
    assert "8192" in found["long"].detail


def test_deadlines_end_requests(either):
    made = Workload([Arrival("late", 0.0, (Piece(1, 50),), 2000, deadline=0.05)])
    [one] = measure(either, made).requests
    assert one.finish == "timeout"
    assert not SLO().kept(one)


class Slow(Target):
    """Answers nothing until all have asked."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.asked, self.all = wanted, 0, asyncio.Event()

    def prepare(self, arrival, said):
        return arrival.id

    async def ask(self, arrival, prepared, keep):
        self.asked += 1
        if self.asked == self.wanted:
            self.all.set()
        await self.all.wait()
        now = asyncio.get_running_loop().time()
        return Answer(times=[now], tokens=1, finish="length", ended=now, prompt=1)


def test_the_loop_is_open():
    """Nobody is answered before the last has asked: a loop that waits for answers would hang here for ever."""

    async def run():
        async with asyncio.timeout(60):
            return await drive(Slow(700), workload("constant:rate=2000,requests=700,prompt=1,output=1"))

    driven = asyncio.run(run())
    assert driven.client.most_open == 700
    first = next(one for one in driven.requests if one.id == "r0")
    assert first.ttft > 0.3, "counted from when it was due"


class Blocking(Slow):
    """Keeps the client's own loop busy when the first asks."""

    async def ask(self, arrival, prepared, keep):
        import time

        if not self.asked:
            time.sleep(0.3)
        return await super().ask(arrival, prepared, keep)


def test_a_late_client_counts_its_own_delay_and_says_so():
    """Coordinated omission: what was due during a stall waited from when it was due."""
    driven = asyncio.run(drive(Blocking(50), workload("constant:rate=200,requests=50,prompt=1,output=1")))
    found = {one.id: one for one in driven.requests}
    assert found["r10"].late > 0.2
    assert found["r10"].ttft > 0.2
    assert found["r10"].arrival == pytest.approx(0.05)
    assert any("sent" in doubt for doubt in driven.client.doubts)


def test_a_fault_of_the_client_is_not_swallowed():
    class Faulty(Slow):
        async def ask(self, arrival, prepared, keep):
            raise ConfigError("no such place")

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(drive(Faulty(5), workload("batch:requests=5,prompt=1,output=1")))
    assert raised.group_contains(ConfigError)
