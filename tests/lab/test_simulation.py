"""Simulation: deterministic, complete, and deciding as the engine does."""

from __future__ import annotations

import csv
import json
from collections import Counter

import pytest

from engine.core import ConfigError, EngineConfig, SamplingParams, assemble
from engine.core.config import Selection
from engine.lab import SLO, Arrival, Fleet, Piece, Simulation, Workload, simulate, workload
from engine.lab.arrivals import tokens_of
from engine.lab.measured import Timed, percentile, timed_gaps, write_csv

PAIRS = [("unified", "paged"), ("radix", "radix"), ("unified", "radix"), ("radix", "paged")]
MIXED = "bursts:rate=30,requests=60,prompt=lognormal:120:1:900,output=exp:20:80,prefix=48,prefixes=3"


class FixedCost:
    """So many seconds a step, and so many a token."""

    def __init__(self, step=0.01, token=0.0):
        self.step, self.token = step, token

    def seconds(self, work):
        return self.step + self.token * work.tokens

    def describe(self):
        return {"step": self.step}


def config(**more):
    return EngineConfig(**{"model": "smollm2-135m", "num_pages": 400, "max_running": 16, **more})


def requests(*rows, **more):
    """(id, at, prompt tokens, output) each."""
    return Workload(
        [Arrival(name, at, (Piece(n, prompt),), output, **more) for n, (name, at, prompt, output) in enumerate(rows)]
    )


def by_id(results):
    return {one.id: one for one in results.requests}


# ---- time


def test_times_by_hand():
    """Host 1 ms and device 10 ms a step: r1 comes in the middle of r0's second step and joins the third."""
    made = requests(("r0", 0.5, 20, 4), ("r1", 0.515, 20, 2))
    found = by_id(simulate(config(), made, cost=FixedCost()))
    assert found["r0"].ttft == pytest.approx(0.011)
    assert found["r0"].e2e == pytest.approx(0.044)
    assert found["r0"].tpot == found["r0"].itl == pytest.approx(0.011)
    assert found["r1"].queue == pytest.approx(0.522 - 0.515)
    assert found["r1"].ttft == pytest.approx(0.533 - 0.515)
    assert found["r1"].e2e == pytest.approx(0.544 - 0.515)


def test_an_engine_that_is_idle_begins_at_once_and_steps_are_as_long_as_they_compute():
    found = by_id(simulate(config(), requests(("a", 1.0, 100, 1), ("b", 9.0, 10, 1)), cost=FixedCost(0.0, 0.001)))
    assert (found["a"].ttft, found["b"].ttft) == pytest.approx((0.101, 0.011))
    assert (found["a"].queue, found["b"].queue) == (0.0, 0.0)


def test_nobody_sleeps(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"slept {seconds} s"))
    found = simulate(config(), requests(("a", 0.0, 50, 50), ("b", 1e6, 50, 50)), Fleet(replicas=1, prefill=1))
    assert found.seconds > 1e6


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("scheduler", "kvcache"), PAIRS)
def test_answers_end_before_what_was_asked_for_also_where_they_are_preempted(scheduler, kvcache, overlap):
    text = "poisson:rate=200,requests=40,prompt=20,output=1-300,max-tokens=300"
    options = {"schedule_conservativeness": 0.01} if scheduler == "radix" else {}
    chosen = Selection(name=scheduler, options=options)
    engine = config(scheduler=chosen, kvcache=kvcache, num_pages=60, overlap=overlap)
    made = workload(text)
    results = simulate(engine, made, cost=FixedCost())
    assert results.summary()["preemptions"] > 0
    asked = {one.id: one for one in made}
    for one in results.requests:
        assert one.output == asked[one.id].output
        assert one.finish == ("length" if one.output == 300 else "stop")


def test_what_is_asked_for_is_reserved_by_the_scheduler_that_reserves():
    """Ten tokens each: with a hundred asked for, prefill-first lets fewer in at a time."""
    texts = [f"batch:requests=30,prompt=20,output=10,max-tokens={asked}" for asked in (10, 100)]
    engine = config(scheduler="radix", kvcache="radix", num_pages=60)
    short, long = (simulate(engine, workload(text), cost=FixedCost()).summary() for text in texts)
    assert long["rows_a_step"] < 0.8 * short["rows_a_step"]


def test_deadlines_are_on_the_simulated_clock():
    found = by_id(simulate(config(), requests(("a", 100.0, 20, 50), deadline=0.2), cost=FixedCost()))
    assert found["a"].finish == "timeout"
    assert 0.2 <= found["a"].e2e < 0.2 + 0.012
    assert found["a"].output == 19, "the step under way is computed to its end"


CLOCKED = """
from engine.core import Policy, hookimpl

seen = []


class Clocked(Policy):
    name = "clocked"

    def start(self, context):
        self.clock = context.clock

    @hookimpl
    def commit(self, outcome):
        seen.append(self.clock())
"""


def test_policies_are_told_the_simulated_time(tmp_path, monkeypatch):
    (tmp_path / "clocked_policy.py").write_text(CLOCKED)
    monkeypatch.syspath_prepend(tmp_path)
    simulate(config(policies="clocked_policy:Clocked"), requests(("a", 50.0, 20, 3)), cost=FixedCost())
    import clocked_policy

    assert clocked_policy.seen == pytest.approx([50.011, 50.022, 50.033])


# ---- the same decisions as an engine's


def decisions(core):
    """What each plan decides, noted as it is made."""
    found, plan = [], core.plan

    def noted():
        made = plan()
        if made:
            rows = zip([r.id for r in made.requests], made.starts, made.counts, made.samples, strict=True)
            found.append((*rows, made.mode, [r.id for r in made.preempted], made.evicted_pages))
        return made

    core.plan = noted
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize(("scheduler", "kvcache"), PAIRS)
def test_decides_as_the_same_engine_in_real_time(scheduler, kvcache, overlap):
    """All come at once, so that no decision depends on how long a step takes. The pool is short: some are preempted."""
    made = workload("batch:requests=24,prompt=20-200,output=20-40,prefix=32,prefixes=3", 5)
    shared = {
        "scheduler": scheduler,
        "kvcache": kvcache,
        "overlap": overlap,
        "num_pages": 90,
        "max_batch_tokens": 256,
        "audit": True,
    }
    simulation = Simulation(config(**shared), made)
    simulated = decisions(simulation.replicas[0].core)
    results = simulation.run()
    core = assemble(config(**shared, executor={"name": "sim", "max_model_len": 8192}))
    real = decisions(core)
    for one in made:
        params = SamplingParams(max_tokens=one.output, temperature=0.0, ignore_eos=True)
        core.add(tokens_of(one.prompt, 49152), params, request_id=one.id)
    while core.has_work:
        core.step()
    assert simulated == real
    assert results.engines[0].preemptions == core.counters.preemptions
    core.close()


def test_it_is_the_real_thing_that_is_preempted_and_evicts():
    results = simulate(config(num_pages=90), workload("batch:requests=40,prompt=20-200,output=30-60"))
    assert results.engines[0].preemptions > 0
    assert results.engines[0].evicted_pages > 0
    assert sum(one.preemptions for one in results.requests) == results.engines[0].preemptions


# ---- determinism and conservation


FLEETS = [Fleet(), Fleet(replicas=3, router="prefix"), Fleet(replicas=2, prefill=2, router="least-tokens")]


@pytest.mark.parametrize("fleet", FLEETS, ids=["one", "three", "split"])
@pytest.mark.parametrize(("scheduler", "kvcache"), PAIRS[:2])
def test_twice_is_the_same(fleet, scheduler, kvcache):
    chosen = config(scheduler=scheduler, kvcache=kvcache)
    one, other = (simulate(chosen, workload(MIXED, 2), fleet) for _ in range(2))
    assert one.requests == other.requests
    assert one.engines == other.engines
    assert (one.gaps == other.gaps).all()


@pytest.mark.parametrize("fleet", FLEETS, ids=["one", "three", "split"])
@pytest.mark.parametrize(
    "text",
    [
        MIXED,
        "conversations:rate=5,sessions=8,pause=exp:0.2,output=20",
        "agents:rate=5,runs=2,output=20,tool=100,system=200",
    ],
)
def test_every_request_ends_once_with_all_its_tokens(fleet, text):
    made = workload(text, 1)
    results = simulate(config(num_pages=3000), made, fleet)
    assert Counter(one.id for one in results.requests) == Counter(one.id for one in made)
    found, wanted = by_id(results), {one.id: one for one in made}
    for name, one in found.items():
        arrival = wanted[name]
        before = found[arrival.continues].prompt + found[arrival.continues].output if arrival.continues else 0
        assert one.prompt == before + arrival.new_tokens
        assert one.finish == "length"
        assert one.output == arrival.output
        assert one.e2e >= one.ttft > one.queue >= 0
        assert one.arrival >= (max(found[o].arrival + found[o].e2e for o in arrival.after) if arrival.after else 0)
    assert len(results.gaps) == sum(one.output - 1 for one in results.requests)
    total = results.summary()
    assert total["ends"] == {"length": len(made)}
    assert total["itl"]["mean"] * len(results.gaps) == pytest.approx(
        sum(one.tpot * (one.output - 1) for one in results.requests if one.tpot is not None), rel=1e-4
    )


def test_a_conversation_finds_what_was_said_before():
    made = workload("conversations:rate=1,sessions=1,turns=3,system=0,prompt=160,output=33,pause=1")
    found = by_id(simulate(config(), made))
    assert [found[f"s0.{turn}"].cached for turn in range(3)] == [0, 192, 384]  # whole pages of 16 of 193 and 386


def test_those_who_follow_a_request_that_was_refused_are_skipped():
    long = Arrival("long", 0.0, (Piece(1, 20_000),), 4)
    after = Arrival("after", 0.0, (Piece(2, 5),), 4, after=("long",), continues="long")
    both = Arrival("both", 0.0, (Piece(3, 5),), 4, after=("long", "after"))
    found = by_id(simulate(config(), Workload([long, after, both])))
    assert {name: one.finish for name, one in found.items()} == {
        "long": "refused",
        "after": "skipped",
        "both": "skipped",
    }
    assert "at most" in found["long"].detail


def test_a_full_queue_refuses_as_a_server_does():
    found = simulate(config(max_waiting=3, max_running=1), workload("batch:requests=10,output=5"), cost=FixedCost())
    ends = Counter(one.finish for one in found.requests)
    assert ends["refused"] > 0
    assert sum(ends.values()) == 10


def test_what_cannot_be_simulated_is_refused(tmp_path):
    files = ({"name": "file", "root": str(tmp_path)},)
    with pytest.raises(ConfigError, match="cannot be simulated"):
        simulate(config(connectors=files), workload(MIXED))
    with pytest.raises(ConfigError, match="router"):
        simulate(config(), workload(MIXED), Fleet(router="random"))
    with pytest.raises(ConfigError, match="fleet of 0"):
        Fleet(replicas=0)


def test_an_empty_workload_is_no_time():
    found = simulate(config(), Workload([]))
    assert (found.seconds, len(found.requests), len(found.gaps)) == (0.0, 0, 0)
    assert found.summary()["ttft"]["p99"] is None


def test_progress_is_told_to_the_end():
    told = []
    simulate(config(), workload(MIXED), cost=FixedCost(), progress=lambda *now: told.append(now))
    assert told[-1][:2] == (60, 60)
    assert [done for done, *_ in told] == sorted(done for done, *_ in told)


# ---- measures


def test_percentiles_and_gaps_by_hand():
    gaps, own = timed_gaps([1.0, 1.5, 1.75, 4.75])
    assert gaps.tolist() == [0.5, 0.25, 3.0]
    assert own == pytest.approx({"tpot": 1.25, "itl": 0.5 + 2.5 * 0.98, "stall": 3.0})
    assert percentile(gaps, 50) == 0.5
    assert timed_gaps([1.0])[1] == {}


def timed(**more):
    return Timed(**{"id": "a", "tenant": "", "arrival": 0.0, "prompt": 1, "output": 2, "finish": "length", **more})


def test_goodput_counts_what_keeps_every_limit():
    slo = SLO.parse("ttft=1.0,itl=0.05")
    assert slo.kept(timed(ttft=1.0, itl=0.05))
    assert not slo.kept(timed(ttft=1.01, itl=0.01))
    assert not slo.kept(timed(ttft=0.5, itl=0.06))
    assert slo.kept(timed(ttft=0.5))
    assert not slo.kept(timed(ttft=0.5, itl=0.01, finish="timeout"))
    for wrong in ("ttft", "ttft=x", "tft=1", "ttft=0", "ttft=inf", ""):
        with pytest.raises(ConfigError, match="no limit such as"):
            SLO.parse(wrong)


def test_the_summary_adds_up(tmp_path):
    results = simulate(config(), requests(("a", 0.0, 20, 3), ("b", 2.0, 20, 5)), cost=FixedCost())
    slo = SLO.parse("e2e=0.04")
    total = results.summary(slo)
    assert total["seconds"] == pytest.approx(2.055)
    assert total["requests_per_second"] == pytest.approx(2 / 2.055)
    assert total["output_tokens_per_second"] == pytest.approx(8 / 2.055)
    assert total["slo"] == {
        "limits": {"e2e": 0.04}, "kept": 1, "share": 0.5, "goodput": pytest.approx(1 / 2.055), "over": {"e2e": 1}
    }  # fmt: skip
    assert total["busy_share"] == pytest.approx(0.08 / 2.055)
    assert total["rows_a_step"] == 1.0
    plain = json.loads(json.dumps(results.plain(slo, each=True)))
    assert [one["id"] for one in plain["requests"]] == ["a", "b"]
    assert plain["about"]["limits"]["num_pages"] == 400
    write_csv(tmp_path / "out.csv", results.requests)
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [(row["id"], row["output"], row["handoff"]) for row in rows] == [("a", "3", ""), ("b", "5", "")]
    assert float(rows[0]["ttft"]) == pytest.approx(0.011)


# ---- fleets


def test_prompts_are_computed_elsewhere_and_come_over():
    """By hand: a step of 11 ms computes the prompt; its 6 whole pages take 2 ms and what they weigh; the engine that
    answers looks every half millisecond, and computes the last 4 tokens with its first step."""
    fleet = Fleet(replicas=1, prefill=1, link_gbps=1.0, link_ms=2.0)
    found = by_id(simulate(config(), requests(("a", 1.0, 100, 5)), fleet, cost=FixedCost()))["a"]
    kv = 6 * 16 * 2 * 30 * 3 * 64 * 2
    ready = 0.011 + 0.002 + kv * 8 / 1e9
    assert found.ttft == pytest.approx(ready + 0.011, abs=0.0016)
    assert found.handoff == pytest.approx(ready - 0.011, abs=0.0016)
    assert found.output == 5
    assert (found.engine, found.prefill_engine) == ("decode-0", "prefill-0")
    assert found.tpot == pytest.approx(0.011)


def test_a_link_carries_one_transfer_after_the_other():
    fleet = Fleet(replicas=1, prefill=1, link_gbps=0.05, link_ms=0.0)
    found = by_id(simulate(config(), requests(("a", 0.0, 100, 1), ("b", 0.0, 100, 1)), fleet, cost=FixedCost()))
    one = 6 * 16 * 2 * 30 * 3 * 64 * 2 * 8 / 0.05e9
    assert found["a"].handoff == pytest.approx(one, abs=0.02)
    assert found["b"].handoff == pytest.approx(2 * one, abs=0.02)


def test_what_a_split_fleet_loads_is_computed_once():
    made = workload("poisson:rate=20,requests=30,prompt=100-300,output=5")
    results = simulate(config(num_pages=3000), made, Fleet(replicas=2, prefill=2))
    prompts = sum(one.new_tokens for one in made)
    tokens = {
        kind: sum(one.tokens for one in results.engines if one.engine.startswith(kind)) for kind in ("pre", "dec")
    }
    assert tokens["pre"] == prompts
    assert tokens["dec"] < 30 * 16 + 30 * 5


def test_one_token_is_answered_by_the_engine_that_answers():
    found = by_id(simulate(config(), requests(("a", 0.0, 40, 1)), Fleet(prefill=1), cost=FixedCost()))["a"]
    assert (found.output, found.finish, found.engine) == (1, "length", "decode-0")


def test_a_prompt_that_fits_nowhere_ends_at_the_first_engine():
    found = by_id(simulate(config(), requests(("a", 0.0, 9000, 1)), Fleet(prefill=1)))["a"]
    assert (found.finish, found.output) == ("refused", 0)


@pytest.mark.parametrize("name", ["round-robin", "least-open", "least-tokens", "prefix"])
def test_routers_use_every_engine(name):
    results = simulate(config(), workload("poisson:rate=60,requests=120,output=20-40"), Fleet(replicas=4, router=name))
    spread = Counter(one.engine for one in results.requests)
    assert len(spread) == 4
    assert min(spread.values()) > 10


def test_prefix_routing_finds_more_in_the_caches():
    made = workload("poisson:rate=20,requests=120,prompt=30,output=4,prefix=320,prefixes=12")
    cached = {}
    for name in ("round-robin", "prefix"):
        results = simulate(config(num_pages=140), made, Fleet(replicas=4, router=name))
        cached[name] = results.summary()["cached_share"]
    assert cached["prefix"] > cached["round-robin"] + 0.3


def test_many_engines_are_one_loop():
    made = workload("constant:rate=400,requests=200,prompt=20,output=3")
    results = simulate(config(num_pages=20), made, Fleet(replicas=100))
    assert {one.finish for one in results.requests} == {"length"}
    assert Counter(one.engine for one in results.requests) == dict.fromkeys([f"engine-{n}" for n in range(100)], 2)
