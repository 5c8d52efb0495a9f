"""How long the executor waits between two steps, with the next one planned while it computes, and without.

    python benchmarks/overlap.py [--rounds 3] [--steps 60] [--executors sim,torch] [--rows 64] [--quick]

A gap is the time from the end of one step of the executor to the beginning of the next, in steady decode of so many
rows: while the device has nothing to do. ``sync`` commits and plans in it, ``overlap`` does so while the step computes.
``sim`` takes 5 ms for a step, whatever it computes, so that the host's own work is seen; ``torch`` is the default model
on the CPU, where planning and computing share the cores. The four sides take turns within each round; printed are
medians over all rounds.

On a device that works on its own a step is launched before the one before has ended, and no clock of the host sees the
gap: ``gpu_check.py`` measures it there.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.core import EngineConfig, SamplingParams, assemble
from engine.core.plan import Outcome, Plan

SCHEDULERS = ("unified", "radix")
PROMPT = 12  # tokens
WARM = 8  # steps of steady decode before anything counts
COLUMNS = "{:<9}{:<10}{:<9}{:>5}{:>11}{:>11}{:>11}{:>12}{:>12}"
HEAD = COLUMNS.format(
    "executor", "scheduler", "loop", "rows", "gap p50", "gap p90", "step p50", "idle part", "tokens/s"
)


@dataclass(slots=True)
class Figures:
    """Of one side: µs between steps, µs of steps, and tokens a second of each round."""

    gaps: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


class Watch:
    """Stands before an executor's ``launch``: notes when a step of all rows begins and ends."""

    def __init__(self, launch: Callable[[Plan], Callable[[], Outcome]], rows: int) -> None:
        self._launch, self._rows = launch, rows
        self.spans: list[tuple[float, float]] = []

    def __call__(self, plan: Plan) -> Callable[[], Outcome]:
        began = time.perf_counter()
        answer = self._launch(plan)
        if plan.total_tokens == len(plan.requests) == self._rows:
            self.spans.append((began, time.perf_counter()))
        return answer


def one_round(executor: dict[str, Any], scheduler: str, *, overlap: bool, rows: int, steps: int, into: Figures) -> None:
    """An engine of its own, all rows decoding."""
    pages = rows * (4 + (steps + WARM) // 16)
    core = assemble(
        EngineConfig(executor=executor, scheduler=scheduler, overlap=overlap, num_pages=pages, max_running=rows)
    )
    try:
        watch = Watch(core.executor.launch, rows)
        core.executor.launch = watch  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=steps + WARM + 4, ignore_eos=True)
        for row in range(rows):
            core.add([100 + (7 * row + at) % 900 for at in range(PROMPT)], params)
        while core.has_work and len(watch.spans) < WARM + steps:
            core.step()
        spans = watch.spans[WARM:]
    finally:
        core.close()
    into.gaps += [1e6 * (after[0] - before[1]) for before, after in itertools.pairwise(spans)]
    into.steps += [1e6 * (end - begin) for begin, end in spans]
    into.rates.append(rows * (len(spans) - 1) / (spans[-1][1] - spans[0][1]))


def compare(name: str, executor: dict[str, Any], *, rows: int, steps: int, rounds: int) -> None:
    """Both schedulers in both loops, in turns. Prints a line each."""
    sides = [(scheduler, overlap) for scheduler in SCHEDULERS for overlap in (False, True)]
    figures = {side: Figures() for side in sides}
    for number in range(rounds):
        for side in reversed(sides) if number % 2 else sides:
            scheduler, overlap = side
            one_round(executor, scheduler, overlap=overlap, rows=rows, steps=steps, into=figures[side])
    for (scheduler, overlap), found in figures.items():
        gaps, step = sorted(found.gaps), statistics.median(found.steps)
        middle, late = statistics.median(gaps), gaps[int(0.9 * (len(gaps) - 1))]
        cells = [f"{middle:.0f} us", f"{late:.0f} us", f"{step / 1e3:.2f} ms", f"{middle / (middle + step):.1%}"]
        loop = "overlap" if overlap else "sync"
        print(COLUMNS.format(name, scheduler, loop, rows, *cells, f"{statistics.median(found.rates):.0f}"), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, help="decoding at once (default: 256 of sim, 16 of torch)")
    parser.add_argument("--executors", default="sim,torch")
    parser.add_argument("--quick", action="store_true", help="a few steps of sim, to see that it runs")
    given = parser.parse_args()
    executors: dict[str, tuple[dict[str, Any], int]] = {
        "sim": ({"name": "sim", "step_ms": 1.0 if given.quick else 5.0}, 256),
        "torch": ({"name": "torch", "device": "cpu"}, 16),
    }
    chosen = ["sim"] if given.quick else given.executors.split(",")
    rounds, steps = (1, 6) if given.quick else (given.rounds, given.steps)
    print(HEAD)
    for name in chosen:
        executor, rows = executors[name]
        compare(name, executor, rows=given.rows or (4 if given.quick else rows), steps=steps, rounds=rounds)


if __name__ == "__main__":
    main()
