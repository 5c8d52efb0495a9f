"""Decision logs: what a simulation writes is replayed, fitted, and simulated again."""

from __future__ import annotations

import json

import pytest

from engine.core import ConfigError, EngineConfig, SamplingParams, assemble
from engine.lab import Fitted, Fleet, Simulation, errors, fit_log, read_log, simulate, steps_of, workload
from engine.lab.work import work_of_plan

TRUE = Fitted({"step": 4e-3, "prefill_tokens": 2e-5, "decode_rows": 5e-5, "scores": 1e-8})
WORK = "poisson:rate=40,requests=60,prompt=40-300,output=5-30,prefix=64,prefixes=2"


def logged(tmp_path, overlap=False, fleet=None, **more):
    """A simulation's log, its results, and the work of its steps as they were planned."""
    config = EngineConfig(
        model="smollm2-135m", num_pages=200, max_running=16, overlap=overlap, record_dir=str(tmp_path), **more
    )
    simulation = Simulation(config, workload(WORK, 3), fleet, cost=TRUE)
    core, works = simulation.replicas[0].core, []
    plan = core.plan

    def noted():
        made = plan()
        if made:
            works.append(work_of_plan(made))
        return made

    core.plan = noted
    return simulation.run(), works


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_the_log_tells_what_each_step_computed_and_how_long_it_took(tmp_path, overlap):
    _, works = logged(tmp_path, overlap)
    steps = steps_of(read_log(tmp_path / "engine-0"))
    assert [step.work for step in steps] == works
    host = 0.0 if overlap else 0.001
    busy = [step.seconds - TRUE.seconds(step.work) - host for step in steps]
    late = [seconds for seconds in busy if abs(seconds) > 2e-6]
    # In overlap mode the device waits for the host at the beginning of each busy spell: one step of it.
    assert all(seconds == pytest.approx(0.001, abs=2e-6) for seconds in late)
    assert len(late) < (len(steps) / 5 if overlap else 1)


def test_a_cost_that_is_fitted_to_a_log_simulates_it_again(tmp_path):
    first, _ = logged(tmp_path)
    found = fit_log([tmp_path / "engine-0"])
    assert errors(found, steps_of(read_log(tmp_path / "engine-0"))).p99 < 0.01
    assert found.about["limits"]["num_pages"] == 200
    options = {"name": "engine.lab.executor:ModelledExecutor", "host_ms": 0}
    config = EngineConfig(model="smollm2-135m", num_pages=200, max_running=16, executor=options)
    again = simulate(config, workload(f"log:{tmp_path / 'engine-0'}"), cost=found)
    before, after = first.summary(), again.summary()
    assert after["requests"] == before["requests"] == 60
    assert after["cached_share"] == before["cached_share"] > 0.1
    assert after["ttft"]["mean"] == pytest.approx(before["ttft"]["mean"], rel=0.02)
    assert after["itl"]["p99"] == pytest.approx(before["itl"]["p99"], rel=0.02)


def test_the_log_of_a_real_engine_is_a_workload(tmp_path):
    config = EngineConfig(executor="sim", record_dir=str(tmp_path), page_size=16)
    core = assemble(config)
    shared = list(range(40))
    for number in range(3):
        core.add(
            [*shared, *range(100 * number, 100 * number + 15)], SamplingParams(max_tokens=4 + number), priority=number
        )
    while core.has_work:
        core.step()
    core.close()
    made = workload(f"log:{tmp_path}").arrivals
    assert [(one.new_tokens, one.output, one.priority) for one in made] == [(55, 4, 0), (55, 5, 1), (55, 6, 2)]
    assert made[0].prompt[:2] == made[1].prompt[:2] == made[2].prompt[:2], "32 of 40 tokens are whole groups"
    assert made[0].prompt[2] != made[1].prompt[2]
    assert len(steps_of(read_log(tmp_path))) >= 6


def test_every_engine_of_a_fleet_has_its_own_log(tmp_path):
    results, _ = logged(tmp_path, fleet=Fleet(replicas=2, prefill=1))
    names = {one.engine for one in results.engines}
    assert {path.name for path in tmp_path.iterdir()} == names == {"decode-0", "decode-1", "prefill-0"}
    rows = sum(len(read_log(tmp_path / name).adds) for name in names)
    assert rows == 2 * 60


def test_what_is_no_log_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        workload(f"log:{tmp_path / 'none'}")
    (tmp_path / "other.jsonl").write_text(json.dumps({"timestamp": 1}) + "\n")
    with pytest.raises(Exception, match="no decision log"):
        read_log(tmp_path / "other.jsonl")
