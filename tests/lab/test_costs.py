"""How long steps take: against figures computed by hand, and fits of what was measured."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from engine.core import ConfigError, EngineConfig, ModelError, SamplingParams, assemble
from engine.core.least_squares import nnls
from engine.lab import Fitted, Measured, Roofline, StepWork, errors, fit, gpu, load_fitted, shape
from engine.lab.clock import SimulatedClock
from engine.lab.executor import WHERE
from engine.lab.shapes import of_config
from engine.lab.work import work_of

LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def test_the_work_of_a_step_by_hand():
    # A prompt of 5 from 10 on sees 11+12+13+14+15 positions; a decode at 100 sees 101; a chunk of 3 from 0 sees 1+2+3.
    assert work_of((10, 100, 0), (5, 1, 3), 2) == StepWork(9, 8, 1, 15 + 101 + 3, 65 + 101 + 6, 2)
    assert work_of((7, 9), (1, 1), 2) == StepWork(2, 0, 2, 8 + 10, 8 + 10, 2)


def test_sizes_of_a_model_by_hand():
    model = of_config(LLAMA, "mine")
    attention = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2)
    mlp = 32 * 3 * 4096 * 14336
    assert model.attention_weights == attention
    assert model.weights == attention + mlp + 2 * 4096 * 128256  # the 8.03 billion that its name says
    assert model.weights == pytest.approx(8.03e9, rel=0.001)
    assert model.kv_numbers * 2 == 131_072  # bytes a token in 16 bits
    assert shape("llama-3-8b").weights == model.weights
    assert shape("meta-llama/Llama-3-8B-Instruct").weights == model.weights


def test_sizes_of_experts_by_hand():
    model = shape("mixtral-8x7b")
    assert model.weights == pytest.approx(46.7e9, rel=0.005)
    assert model.weights_a_token + model.output_weights == pytest.approx(12.8e9, rel=0.02)
    assert model.experts_read(1) == pytest.approx(2)
    assert model.experts_read(2) == pytest.approx(8 * (1 - 0.75**2))
    assert 7.9 < model.experts_read(64) <= 8
    assert shape("qwen3-30b-a3b").weights == pytest.approx(30.5e9, rel=0.01)


def test_a_model_is_read_from_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "head_dim": 64, "tie_word_embeddings": True}))
    model = shape(str(tmp_path))
    assert (model.head_dim, model.tied, model.name) == (64, True, tmp_path.name)
    assert shape(str(tmp_path / "config.json")) == model


@pytest.mark.parametrize(
    ("data", "words"),
    [({**LLAMA, "kv_lora_rank": 512}, "latent attention"), ({"hidden_size": 4}, "'num_attention_heads' is missing")],
)
def test_a_model_whose_cost_is_not_known_is_refused(data, words):
    with pytest.raises(ModelError, match=words):
        of_config(data, "odd")


def test_names_that_are_not_known_say_what_is_near():
    with pytest.raises(ModelError, match="did you mean 'llama-3-8b'"):
        shape("lama-3-8b")
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        gpu("h10")


def roofline(**more):
    plain = {"compute_share": 1.0, "bandwidth_share": 1.0, "overhead": 0.0}
    return Roofline(model=shape("llama-3-8b"), gpu=gpu("h100"), **{**plain, **more})


def test_one_decode_reads_weights_and_its_kv():
    """By hand: 6.98e9 numbers of layers and 0.525e9 of the output, two bytes each, at 3.35 TB/s; KV of 1000 tokens."""
    parts = roofline().parts(work_of((999,), (1,), 1))
    layers = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    assert parts["linear"] == pytest.approx(layers * 2 / 3.35e12)
    assert parts["output"] == pytest.approx(4096 * 128256 * 2 / 3.35e12)
    assert parts["attention"] == pytest.approx(1000 * 131072 / 3.35e12)
    assert parts["reduce"] == 0
    assert roofline().seconds(work_of((999,), (1,), 1)) == pytest.approx(4.52e-3, rel=0.01)


def test_a_prompt_is_computed():
    """By hand: two operations for each token and number, at 989 TFLOP/s, and 4·heads·dim of each score."""
    parts = roofline().parts(work_of((0,), (4096,), 1))
    layers = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    assert parts["linear"] == pytest.approx(2 * layers * 4096 / 989e12)
    assert parts["attention"] == pytest.approx(4 * 32 * 4096 * (4096 * 4097 / 2) / 989e12)


def test_devices_share_the_work_and_pay_for_it():
    work = work_of((0,), (4096,), 1)
    one, four = roofline().parts(work), roofline(degree=4).parts(work)
    assert four["linear"] == pytest.approx(one["linear"] / 4)
    moved = 2 * 3 / 4 * 4096 * 4096 * 2
    assert four["reduce"] == pytest.approx(64 * (10e-6 + moved / 450e9))


def test_shares_overhead_and_small_numbers():
    work = work_of((999,), (1,), 1)
    assert roofline(bandwidth_share=0.5).seconds(work) == pytest.approx(2 * roofline().seconds(work))
    assert roofline(overhead=0.25).seconds(work) == pytest.approx(0.25 + roofline().seconds(work))
    assert roofline(weight_bytes=1.0).parts(work)["linear"] == pytest.approx(roofline().parts(work)["linear"] / 2)
    assert roofline(overhead=0.25).seconds(work_of((), (), 0)) == 0.0


# ---- on the executor


def modelled(overlap=False, **options):
    clock = SimulatedClock()
    executor = {"name": WHERE, **options}
    core = assemble(
        EngineConfig(model="llama-3-8b", executor=executor, overlap=overlap), clock=clock, sleep=clock.sleep
    )
    core.executor.simulated = clock
    return core, clock


def test_the_pool_is_what_the_weights_leave():
    core, _ = modelled(memory_share=0.5)
    assert core.pool.num_pages == int((40e9 - shape("llama-3-8b").weights * 2) // (131072 * 16))
    assert core.limits.max_batch_tokens == 8192
    core.close()
    with pytest.raises(ConfigError, match="leave no room"):
        modelled(gpu="t4")


class Fixed:
    """Every step takes 10 ms."""

    def seconds(self, work):
        return 0.010

    def describe(self):
        return {}


@pytest.mark.parametrize(("overlap", "each"), [(False, 0.013), (True, 0.010)])
def test_the_host_plans_between_steps_or_during_them(overlap, each):
    core, clock = modelled(overlap, host_ms=3)
    core.executor.cost = Fixed()
    core.add([1, 2, 3], SamplingParams(max_tokens=5))
    times = []
    while core.has_work:
        times += [clock.now for delta in core.step() for _ in delta.tokens]
    core.close()
    assert times == pytest.approx([0.013 + each * step for step in range(5)])


def test_on_the_machines_clock_it_waits():
    core = assemble(EngineConfig(model="smollm2-135m", executor={"name": WHERE, "host_ms": 0}))
    core.executor.cost = Fixed()
    core.add([1, 2, 3], SamplingParams(max_tokens=2))
    began = core.now()
    while core.has_work:
        core.step()
    assert core.now() - began >= 0.020
    core.close()


# ---- fits


TRUTH = Fitted({"step": 2e-3, "prefill_tokens": 3e-5, "decode_rows": 1e-4, "scores": 2e-9, "steep_tokens": 5e-5}, 32)


def steps(noise=0.0, count=400, seed=1):
    rng = random.Random(seed)
    for _ in range(count):
        rows = rng.randrange(1, 40)
        counts = [rng.randrange(2, 300) if rng.random() < 0.1 else 1 for _ in range(rows)]
        work = work_of([rng.randrange(0, 2000) for _ in counts], counts, rows)
        yield Measured(work, TRUTH.seconds(work) * (1 + rng.gauss(0, noise)))


def test_a_fit_finds_what_the_steps_were_made_from():
    found = fit(steps(), {"from": "a test"})
    assert errors(found, list(steps(seed=2))).p99 < 0.001
    assert found.about["from"] == "a test"
    assert found.about["steps"] == 400


def test_a_fit_is_not_thrown_off_by_noise_or_by_a_machine_that_was_busy():
    slow = [step._replace(seconds=step.seconds * 40) for step in steps(count=12, seed=3)]
    found = fit([*steps(noise=0.05), *slow])
    assert found.about["left_out"] >= 10
    off = errors(found, list(steps(seed=2)))
    assert off.mean < 0.05
    assert abs(off.total) < 0.05


def test_weights_are_never_negative():
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.normal(size=(30, 5)), rng.normal(size=30)
        x = nnls(a, b)
        assert (x >= 0).all()
        gradient = a.T @ (b - a @ x)  # what could still be gained: none where x is above 0, nothing positive elsewhere
        assert np.abs(gradient[x > 0]).max(initial=0) < 1e-8
        assert gradient.max() < 1e-8


def test_too_few_steps_are_no_fit():
    with pytest.raises(ConfigError, match="at least 16"):
        fit(steps(count=5))


def test_a_fitted_cost_is_kept_in_a_file(tmp_path):
    TRUTH.save(tmp_path / "cost.json")
    assert load_fitted(tmp_path / "cost.json") == TRUTH
    core, clock = modelled(cost=str(tmp_path / "cost.json"), host_ms=0)
    core.add([1] * 10, SamplingParams(max_tokens=1))
    core.step()
    assert clock.now == pytest.approx(TRUTH.seconds(work_of((0,), (10,), 1)))
    core.close()
    for text, words in (("{}", "not a fitted cost"), ('{"kind": "other"}', "its kind is 'other'")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_fitted(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="No such file"):
        load_fitted(tmp_path / "none.json")
