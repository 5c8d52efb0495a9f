"""Prefill held back so that more of it shares a batch: bounded, and never where nothing decodes or memory idles."""

from __future__ import annotations

from engine.core import SamplingParams, Why
from engine.testing import ShadowExecutor, make_core


def batches(options: dict, arrivals: int = 12) -> tuple[list[int], list[int], object]:
    """One request arrives each step beside four that decode: sizes of the prefill batches, steps waited, the core."""
    core = make_core(
        scheduler="radix", executor=ShadowExecutor(), num_pages=256, max_running=16, scheduler_options=options
    )
    for number in range(4):
        core.add([number] * 4, SamplingParams(max_tokens=100), request_id=f"old{number}")
    core.step()
    sizes: list[int] = []
    came: dict[str, int] = {}
    waited: list[int] = []
    for step in range(60):
        if step < arrivals:
            came[f"new{step}"] = step
            core.add([50 + step] * 4, SamplingParams(max_tokens=3), request_id=f"new{step}")
        plan = core.plan()
        if plan.admitted:
            sizes.append(len(plan.admitted))
            waited += [step - came[request.id] for request in plan.admitted]
        core.commit(core.executor.execute(plan))
    return sizes, waited, core


def test_more_prompts_share_a_batch():
    alone, _, _ = batches({})
    together, waited, core = batches({"prefill_delay_passes": 3, "prefill_delay_queue_ratio": 1.0})
    assert len(together) < len(alone)
    assert sum(together) == sum(alone) == 12
    assert max(waited) <= 3, "held back for longer than it may be"
    assert core.executor.mismatch is None


def test_low_usage_starts_at_once():
    assert (
        batches({"prefill_delay_passes": 3, "prefill_delay_queue_ratio": 1.0, "prefill_delay_low_usage": 1.0})[1]
        == (batches({})[1])
    )


def test_nothing_is_held_back_where_nothing_decodes():
    core = make_core(scheduler="radix", scheduler_options={"prefill_delay_passes": 5, "prefill_delay_queue_ratio": 9.0})
    core.add([1, 2], SamplingParams(max_tokens=2))
    assert len(core.plan().admitted) == 1


def test_those_that_wait_are_told():
    core = make_core(scheduler="radix", scheduler_options={"prefill_delay_passes": 5, "prefill_delay_queue_ratio": 1.0})
    for number in range(3):
        core.add([number] * 3, SamplingParams(max_tokens=50))
    core.step()
    core.add([9, 9], SamplingParams(max_tokens=2), request_id="new")
    core.step()
    assert core.why("new") == (Why.DELAY, "")
