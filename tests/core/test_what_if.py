"""What another plugin would have changed, in simulated time: where steps take what the fit says, it is what was."""

from __future__ import annotations

import pytest
from record_kit import ON, VOCABULARY, busy_run, written

from engine.cli._parted import compared, setup_with, table
from engine.core import SamplingParams
from engine.core.errors import ConfigError
from engine.core.record.courses import StepTimes, Timed, courses_of, timed, totals_of
from engine.core.replay.log import Setup
from engine.core.replay.report import NotReplayable
from engine.core.replay.what_if import Figures, fitted, simulate
from engine.plugins.executors.sim import SimExecutor
from engine.testing import make_core

CONSTANT, ROW, TOKEN = 0.004, 0.0001, 0.00005


class Paced(SimExecutor):
    """Steps take an exact time on the engine's clock, which stands still otherwise."""

    def __init__(self) -> None:
        super().__init__(SimExecutor.Options(vocab_size=VOCABULARY))
        self.now = 50.0

    def execute(self, plan):
        self.now += CONSTANT + ROW * len(plan.requests) + TOKEN * plan.total_tokens
        return super().execute(plan)


def evening(path, **setting):
    """Requests that come in time, and are served at an exact pace."""
    executor = Paced()
    usual = {"num_pages": 60, "page_size": 16, "max_batch_tokens": 128, "max_running": 6, "max_model_len": 500}
    core = make_core(executor=executor, clock=lambda: executor.now, record=ON, audit=False, **{**usual, **setting})
    coming = [(50.0 + 0.013 * number, number) for number in range(120)]
    while coming or core.has_work:
        while coming and (coming[0][0] <= executor.now or not core.has_work):
            arrival, number = coming.pop(0)
            executor.now = max(executor.now, arrival)
            prompt = [number % 3 * 50 + at for at in range(20 + number % 7 * 11)] + [number]
            core.add(
                prompt, SamplingParams(max_tokens=4 + number % 9), arrival=arrival,
                metadata={"tenant": "ab"[number % 2]}, deadline=None if number % 10 else 0.0217,
            )  # fmt: skip
        core.step()
    return written(core, path)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return evening(tmp_path_factory.mktemp("logs") / "evening.jsonl")


def test_the_fit_finds_the_pace(log):
    times = fitted(log)
    assert times.steps > 150
    assert times.error < 1e-6
    assert times.constant == pytest.approx(CONSTANT, rel=1e-3)
    assert times.row == pytest.approx(ROW, rel=1e-3)
    assert times.token == pytest.approx(TOKEN, rel=1e-3)
    assert times.context == pytest.approx(0.0, abs=1e-9)
    assert times.overhead == pytest.approx(0.0, abs=1e-9)
    assert times.seconds(10, 100, 7) == pytest.approx(CONSTANT + 10 * ROW + 100 * TOKEN, rel=1e-3)


def test_nothing_is_fitted_to_a_few_steps_and_nothing_is_negative():
    with pytest.raises(ValueError, match="3 steps"):
        StepTimes.fit([Timed(1, 1, 1, 1, 0.1, 0.0)] * 3)
    falling = [Timed(step, 1 + step % 5, 50, 60, 1.0 - 0.1 * (step % 5), 0.0) for step in range(40)]
    times = StepTimes.fit(falling)
    assert min(times.constant, times.row, times.token, times.context) >= 0


def test_what_was_recorded_is_what_the_requests_saw(log):
    courses = courses_of(log)
    assert len(courses.ttft) + courses.ended.get("timeout", 0) >= 120
    assert sum(courses.ended.values()) == 120
    assert courses.ended["timeout"] > 0
    assert min(courses.ttft) > CONSTANT
    assert min(courses.itl) > CONSTANT
    assert sum(step.tokens for step in timed(log)) == totals_of(log)["computed_tokens"]


@pytest.mark.parametrize("scheduler", ["unified", "radix"])
def test_the_same_plugins_in_simulated_time_are_what_was_recorded(scheduler, tmp_path):
    log = evening(tmp_path / "log.jsonl", scheduler=scheduler)
    recorded = Figures.recorded(log)
    again = simulate(log, Setup.of(log.header.config), fitted(log))
    assert again.ended == recorded.ended
    assert again.totals == recorded.totals
    assert again.times == pytest.approx(recorded.times, rel=0.02)


def test_another_scheduler_is_measured_alike(log):
    found = compared(log, "evening", {"scheduler": "radix"})
    assert found["parted"]["step"] > 1
    assert found["equal_steps"] == found["parted"]["step"] - 1
    assert set(found["parted"]["recorded"]) == {"rows", "admitted", "preempted"}
    assert found["same"]["times"] != found["changed"]["times"]
    assert sum(found["changed"]["ended"].values()) == 120
    text = "\n".join(table(found))
    for words in (
        "with scheduler radix",
        "the decisions part at step",
        "ttft_mean",
        "itl_p99",
        "recomputed_tokens",
        "%",
    ):
        assert words in text


def test_an_option_of_the_plugin_that_was_there_is_changed_alone(log):
    setup = setup_with(log, {"scheduler.long_prefill_token_threshold": "32", "max_running": 3})
    name, options = setup.scheduler
    assert name == "unified"
    assert options["long_prefill_token_threshold"] == 32
    assert options["policy"] == "fcfs"
    assert setup.limits.max_running == 3
    assert setup.limits.max_batch_tokens == 128
    assert simulate(log, setup, fitted(log)).times["ttft_mean"] > Figures.recorded(log).times["ttft_mean"]
    with pytest.raises(ConfigError, match="did you mean 'policy'"):
        setup_with(log, {"scheduler.polic": "fcfs"})


def test_less_memory_computes_more_again(log):
    setup = setup_with(log, {"num_pages": 24})
    found = simulate(log, setup, fitted(log))
    assert found.totals["evicted_pages"] > totals_of(log)["evicted_pages"]
    assert found.totals["cached_tokens"] < totals_of(log)["cached_tokens"]


def test_what_is_impossible_there_is_told(log):
    with pytest.raises(NotReplayable, match="impossible there"):
        simulate(log, setup_with(log, {"num_pages": 3}), fitted(log))


def test_overlap_hides_what_the_engine_does_itself(tmp_path):
    log = evening(tmp_path / "log.jsonl")
    times = StepTimes(CONSTANT, ROW, TOKEN, overhead=0.002)
    same = simulate(log, Setup.of(log.header.config), times)
    found = simulate(log, setup_with(log, {"overlap": True}), times)
    assert found.times["itl_mean"] < same.times["itl_mean"] - 0.0015
    assert found.ended["length"] >= same.ended["length"]
    said = compared(log, "evening", {"overlap": True})
    assert said["parted"] is None
    assert "overlap" in said["unknown"]
    assert "where the decisions part is not known" in "\n".join(table(said))


def test_a_torn_log_can_still_be_compared(tmp_path):
    core = busy_run(1500, record_mb=1)
    log = written(core, tmp_path / "log.jsonl")
    found = compared(log, "torn", {"policies": ["fair-share"]})
    assert "does not begin with the engine" in found["unknown"]
    assert sum(found["changed"]["ended"].values()) == len(log.adds)
