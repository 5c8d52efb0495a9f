"""Searches, matrices and cells."""

from __future__ import annotations

import json

import pytest

from engine import ConfigError, EngineConfig
from engine.core.errors import EngineError
from engine.lab import SLO, Fitted, Timed
from engine.lab.cells import Kept, in_turns, line_of, over_rounds
from engine.lab.driving import Client
from engine.lab.jobs import Job, plain, run
from engine.lab.matrix import axis, combinations
from engine.lab.measured import spread
from engine.lab.results import Results
from engine.lab.searching import Found, Search, find_rate

SLOW = SLO.parse("ttft=1")


def results(good: int, bad: int, late: float = 0.0, finish: str = "length") -> Results:
    import numpy as np

    client = Client(spread([late]), spread(()), 0.1, 1, 1.0)
    each = [Timed(f"r{n}", "", 0.0, 1, 1, finish, ttft=0.5 if n < good else 2.0, e2e=2.0) for n in range(good + bad)]
    return Results(workload="", requests=each, gaps=np.empty(0, np.float32), seconds=1.0, engines=(), wall=1, cpu=1,
                   client=client)  # fmt: skip


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.7, 1000.0])
def test_doubling_then_bisection_ends_at_the_capacity(capacity):
    asked = []

    def once(rate):
        asked.append(rate)
        return results(10, 0) if rate <= capacity else results(5, 5)

    found = find_rate(once, SLOW, Search(first=2.0, precision=0.02, most=40))
    assert found.rate <= capacity < found.missed <= found.rate * 1.02
    assert [probe.rate for probe in found.probes] == asked
    assert found.best is not None
    assert f"{found.rate:.3g}" in found.words()


def test_the_share_that_must_keep_it():
    def once(rate):
        return results(90, 10) if rate < 10 else results(89, 11)

    assert find_rate(once, SLOW, Search(share=0.9, precision=0.01)).rate == pytest.approx(10, rel=0.02)
    assert find_rate(once, SLOW, Search(share=0.95, most=5)).rate is None


def test_none_and_all():
    never = find_rate(lambda rate: results(0, 5), SLOW, Search(most=4))
    assert (never.rate, never.missed, never.best) == (None, 0.125, None)
    assert "no rate meets" in never.words()
    always = find_rate(lambda rate: results(5, 0), SLOW, Search(most=4))
    assert (always.rate, always.missed) == (8.0, None)
    assert "at least" in always.words()


def test_a_miss_while_the_client_was_late_is_tried_again():
    calls = []

    def once(rate):
        calls.append(rate)
        stumbles = calls.count(rate) == 1 and rate == 2.0
        return results(0, 5, late=0.5) if stumbles else results(5, 0) if rate <= 5 else results(0, 5)

    found = find_rate(once, SLOW, Search(precision=0.05))
    assert calls[:3] == [1.0, 2.0, 2.0]
    assert found.probes[1].doubts
    assert found.rate == pytest.approx(5, rel=0.06)


def test_nobody_there_is_no_rate():
    with pytest.raises(EngineError, match="no request reached"):
        find_rate(lambda rate: results(0, 3, finish="unreachable"), SLOW, Search())


@pytest.mark.parametrize("wrong", [{"first": 0.0}, {"share": 1.5}, {"most": 0}])
def test_no_search(wrong):
    with pytest.raises(ConfigError):
        Search(**wrong)


# ---- on engines


CONSTANT = "constant:rate=1,requests=120,prompt=20,output=5"


def test_the_rate_of_a_server_of_known_capacity(tmp_path):
    """Each request takes five steps of 10 ms, alone: 20 a second."""
    cost = tmp_path / "cost.json"
    Fitted({"step": 0.01}, 0, {"overlap": False, "limits": {}}).save(cost)
    modelled = {"name": "engine.lab.executor:ModelledExecutor", "host_ms": 0}
    fields = {"max_running": 1, "model": "llama-3-8b", "num_pages": 500, "executor": modelled}
    config = EngineConfig.model_validate(fields)
    job = Job(kind="simulated", config=plain(config), cost=str(cost), workloads=(CONSTANT,), slo="queue=0.06",
              search={"first": 1.0, "precision": 0.02})  # fmt: skip
    found = run(job)
    assert isinstance(found, Found)
    assert 19 < found.rate <= 21.5
    assert found.missed > 20


def test_the_same_of_a_real_engine_never_says_more():
    """It sleeps 10 ms a step: a busy machine makes it slower, nothing makes it faster."""
    config = EngineConfig.model_validate({"max_running": 1, "executor": {"name": "sim", "step_ms": 10}})
    job = Job(config=plain(config), in_process=True, workloads=(CONSTANT.replace("120", "25"),), slo="ttft=0.15",
              search={"first": 8.0, "precision": 0.2, "most": 5})  # fmt: skip
    told = []
    found = run(job, tell=told.append)
    assert isinstance(found, Found)
    assert [probe.rate for probe in told] == [probe.rate for probe in found.probes]
    assert (found.rate or 0.0) < 35, "25 requests at 35/s need 1.25 s for what comes in 0.7 s: most wait longer"
    assert len({one.id for one in found.best.requests}) == 25 if found.best else True


def test_rates_and_numbers_of_any_source(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2024-01-01 00:00:{n:02d}.0000000,10,5\n" for n in range(20)))  # fmt: skip
    job = Job(workloads=(f"azure:{trace}",), rate=4.0, requests=9)
    made = job.workload()
    assert len(made) == 9
    assert [one.at for one in made] == pytest.approx([n / 4 for n in range(9)])
    both = Job(workloads=("constant:rate=1,requests=4", "constant:rate=3,requests=4"), rate=8.0).workload()
    assert max(one.at for one in both if one.id.startswith("1.")) == pytest.approx(1.5)
    with pytest.raises(ConfigError, match="all come at once"):
        Job(workloads=("batch:requests=4",), rate=2.0).workload()
    with pytest.raises(ConfigError, match="--num-requests"):
        Job(workloads=("conversations:rate=1",), requests=3).workload()


# ---- matrices


def choices(config: dict, *axes: str, kind: str = "engine") -> list[dict]:
    job = Job(kind=kind)
    return combinations(job, EngineConfig.model_validate(config), [axis(text) for text in axes])


def test_all_combinations_with_options_where_they_mean_something():
    found = choices(
        {}, "scheduler=unified,radix", "scheduler.chunked-prefill-size=256,512", "policy=,fair-share+deadline"
    )
    told = [tuple(one.choice.items()) for one in found]
    assert len(told) == len(set(told)) == 6
    names = {one.words for one in found}
    assert "scheduler=unified policy=none" in names
    radix = next(
        one for one in found if one.choice.get("scheduler.chunked_prefill_size") == "512" and one.choice["policy"]
    )
    made = EngineConfig.model_validate(radix.job.config)
    assert made.scheduler.options == {"chunked_prefill_size": "512"}
    assert [one.name for one in made.policies] == ["fair-share", "deadline"]


def test_fields_rates_and_what_was_set_before():
    config = {"scheduler": {"name": "radix", "policy": "lpm"}, "executor": {"name": "sim", "step_ms": 3}}
    found = choices(config, "max-running=4,8", "rate=1,2.5", "scheduler=radix,unified")
    assert len(found) == 8
    one = next(one for one in found if one.choice == {"max_running": "8", "rate": "2.5", "scheduler": "radix"})
    made = EngineConfig.model_validate(one.job.config)
    assert (made.max_running, one.job.rate) == (8, 2.5)
    assert made.scheduler.options == {"policy": "lpm"}
    assert made.executor.options == {"step_ms": 3}
    other = next(one for one in found if one.choice["scheduler"] == "unified")
    assert "policy" not in EngineConfig.model_validate(other.job.config).scheduler.options
    with pytest.raises(ConfigError, match=r"takes scheduler\.policy as it was set"):
        choices({"scheduler": {"name": "radix", "policy": "lpm"}}, "scheduler=unified")


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (("scheduler",), "no NAME=VALUE"),
        (("schedular=radix",), "did you mean 'scheduler'"),
        (("scheduler=radix,radix",), "a value twice"),
        (("scheduler=radix", "scheduler=unified"), "there twice"),
        (("scheduler.chunked-size=4",), "no combination has a plugin with the option"),
        (("rate=fast",), "no number of requests a second"),
        (("max-running=none-at-all",), "max_running"),
        (("scheduler=radix", "scheduler.chunked-prefill-size=many"), "chunked_prefill_size"),
        (("max_running.more=1",), "has no options"),
    ],
)  # fmt: skip
def test_a_matrix_that_makes_no_sense(axes, words):
    with pytest.raises(ConfigError, match=words):
        choices({}, *axes)


def test_of_a_server_only_the_rate_can_be_chosen():
    assert len(choices({}, "rate=1,2", kind="endpoint")) == 2
    with pytest.raises(ConfigError, match="cannot be chosen here"):
        choices({}, "scheduler=radix", kind="endpoint")


def test_rounds_are_in_turns_and_have_seeds_of_their_own():
    cells = [*in_turns(choices({}, "rate=1,2,3"), 3)]
    assert [[cell.number for cell in cells if cell.round == turn] for turn in (1, 2, 3)] == [
        [0, 1, 2],
        [1, 2, 0],
        [2, 0, 1],
    ]
    assert {(cell.round, cell.combination.job.seed) for cell in cells} == {(1, 0), (2, 1), (3, 2)}
    assert len({cell.name for cell in cells}) == 9


def test_finished_cells_are_kept_and_others_not(tmp_path):
    cells = [*in_turns(choices({}, "rate=1,2"), 1)]
    kept = Kept(tmp_path / "out", {"rounds": 1, "jobs": [1, 2]})
    assert kept.read(cells[0]) is None
    kept.keep(cells[0], {"choice": {"rate": "1"}, "round": 1, "measured": {}})
    kept.keep(cells[1], {"choice": {"rate": "2"}, "round": 1, "died": "of it"})
    again = Kept(tmp_path / "out", {"rounds": 1, "jobs": (1, 2)})
    assert again.read(cells[0])["choice"] == {"rate": "1"}
    assert again.read(cells[1]) is None, "who died has another try"
    assert sorted(path.name[:5] for path in (tmp_path / "out").iterdir()) == ["cell-", "cell-", "setti"]
    with pytest.raises(ConfigError, match=r"other settings \(jobs, rounds\)"):
        Kept(tmp_path / "out", {"rounds": 2, "jobs": [1]})
    (tmp_path / "out" / "settings.json").unlink()
    with pytest.raises(ConfigError, match="says what of"):
        Kept(tmp_path / "out", {"rounds": 1})


def test_medians_over_rounds():
    def cell(turn, good):
        return {"choice": {"scheduler": "radix"}, "round": turn, "measured": results(good, 10 - good).plain(SLOW)}

    [one] = over_rounds(
        [cell(1, 10), cell(2, 4), cell(3, 6), {"choice": {"scheduler": "radix"}, "round": 4, "died": "x"}]
    )
    assert (one.rounds, one.died) == (3, ["x"])
    assert (one.least["goodput"], one.median["goodput"], one.most["goodput"]) == (4, 6, 10)
    line = line_of(cell(2, 4))
    assert (line["scheduler"], line["round"], line["kept_share"], line["queue_p50"]) == ("radix", 2, 0.4, None)
    assert json.dumps(line)
