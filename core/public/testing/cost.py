"""What a plugin adds to a step, beside the model: two engines that take turns, equal but for it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from engine.core.loop import EngineCore
from engine.core.registry import make
from engine.core.request import SamplingParams
from engine.testing.making import make_core

PAGES, PAGE_SIZE = 10_000, 16
SETTLING = 80  # steps after which as many end as start


class Cost(NamedTuple):
    """Of the best round each, in µs a step (plan and commit): what else the machine does only ever adds."""

    running: int
    without: float
    with_it: float

    @property
    def ratio(self) -> float:
        """How many times as much a step costs with the plugin."""
        return self.with_it / self.without

    def __str__(self) -> str:
        return (
            f"{self.with_it - self.without:+.0f} µs a step at {self.running} running: "
            f"{self.without:.0f} without it, {self.with_it:.0f} with it, x{self.ratio:.2f}"
        )


def measure(
    plugins: Callable[[], Mapping[str, Any]],
    *,
    running: int = 256,
    rounds: int = 12,
    steps: int = 25,
    clock: Callable[[], float] = time.perf_counter,
) -> Cost:
    """Time steps with and without a plugin, in turns, so that a drift of the machine hits both.

    The engines are busy: all slots run, as many wait, and in most steps somebody ends and the next one starts, so that
    every hook is asked.

    Args:
        plugins: makes the arguments of ``make_core`` that bring the plugin in.
        running: requests that run; as many wait behind them.
        rounds: how often the two take turns.
        steps: steps a turn.
        clock: seconds.
    """
    pair = [_settled({}, running), _settled(plugins(), running)]
    collects = gc.isenabled()
    gc.disable()  # whose garbage it would be is chance
    try:
        for core in pair:
            _decode(core, steps, clock)
        times = [[_decode(core, steps, clock) for core in pair] for _ in range(rounds)]
    finally:
        if collects:
            gc.enable()
        for core in pair:
            core.close()
    without, with_it = (min(row[which] for row in times) for which in (0, 1))
    return Cost(running, without, with_it)


def _settled(plugins: Mapping[str, Any], running: int) -> EngineCore:
    """An engine in its steady state."""
    settings: dict[str, Any] = {
        "executor": make("executor", "sim", {"max_model_len": 1000}), "num_pages": PAGES, "page_size": PAGE_SIZE,
        "max_running": running, "max_batch_tokens": max(2048, 2 * running), "max_waiting": 10_000, "audit": False,
    }  # fmt: skip
    core = make_core(**{**settings, **plugins})
    for _ in range(SETTLING):
        _feed(core)
        core.step()
    return core


def _feed(core: EngineCore) -> None:
    """As many wait as may run."""
    while len(core.waiting) < core.limits.max_running:
        number = core.counters.accepted
        params = SamplingParams(max_tokens=16 + number * 7 % 64, seed=number)
        core.add([number % 1000] * 32, params, metadata={"tenant": f"t{number}"})


def _decode(core: EngineCore, steps: int, clock: Callable[[], float]) -> float:
    """µs a step of planning and committing."""
    spent = 0.0
    for _ in range(steps):
        _feed(core)
        start = clock()
        plan = core.plan()
        planned = clock()
        outcome = core.executor.execute(plan)
        executed = clock()
        core.commit(outcome)
        spent += planned - start + clock() - executed
        core.take_deltas()
    return spent * 1e6 / steps
