"""What a step made goes as soon as nobody has it: nothing of it waits for the garbage collector."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.core import SamplingParams
from engine.core.step import Step
from engine.testing import make_core


@contextmanager
def left_behind() -> Iterator[Counter[str]]:
    """Fills in what of the engine only the collector found, by class."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("engine."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("scheduler", "kvcache"), list(itertools.product(("unified", "radix"), ("paged", "radix"))))
def test_steps_plans_and_requests_leave_nothing_to_collect(scheduler, kvcache, overlap):
    core = make_core(scheduler=scheduler, kvcache=kvcache, num_pages=24, max_batch_tokens=32, overlap=overlap,
                     policies=["fair-share"])  # fmt: skip
    with left_behind() as found:
        for number in range(20):
            tokens = [number % 3] * 8 + [number] * (number % 7 + 1)
            core.add(tokens, SamplingParams(max_tokens=6 + number % 9, ignore_eos=True), request_id=f"r{number}")
        core.abort("r3")
        while core.has_work:
            core.step()
    assert not found
    core.close()


def test_a_cycle_would_be_found():
    core = make_core(scheduler="unified", kvcache="paged")
    with left_behind() as found:
        step = Step(core, 1)
        step.admitted.append(step)  # type: ignore[arg-type]
        del step
    assert found["Step"] == 1
    core.close()
