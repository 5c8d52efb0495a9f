"""Engines that step in turns, each kept busy by the same clients: what one of them costs more than the first."""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from engine.core import EngineConfig, SamplingParams
from engine.core.assemble import assemble
from engine.core.loop import EngineCore

SLICE = 40  # steps of one side before the next has its turn
HEAD = f"{'wall us':>10}{'ratio':>8}{'cpu us':>10}{'ratio':>8}"

Figures = Mapping[tuple[str, bool], Sequence[float]]
"""µs a step in each round, by side and by whether it is CPU time."""


class Side:
    """One engine of executor ``sim``, and the clients that keep it busy.

    Args:
        fields: of its ``EngineConfig``, over what all sides have.
        churn: requests end, and others come.
    """

    def __init__(
        self, name: str, fields: Mapping[str, Any], *, running: int, waiting: int, churn: bool, step_ms: float
    ) -> None:
        self.name, self._running, self._waiting, self._churn = name, running, waiting, churn
        self._draw = random.Random(0)
        alike = {
            "executor": {"name": "sim", "max_model_len": 100_000, "step_ms": step_ms}, "num_pages": running * 100,
            "max_running": running, "max_batch_tokens": 4096, "max_waiting": 10_000,
        }  # fmt: skip
        self.core: EngineCore = assemble(EngineConfig.model_validate({**alike, **fields}))

    def fill(self) -> None:
        """Requests come until as many are here as shall be."""
        core, draw = self.core, self._draw
        while len(core.requests) < self._running + self._waiting:
            length, shared = draw.randrange(200, 400), draw.randrange(4)
            output = draw.randrange(20, 120) if self._churn else 90_000
            core.add(
                [shared] * 64 + [draw.randrange(1000) for _ in range(length)],
                SamplingParams(max_tokens=output, ignore_eos=True), metadata={"tenant": "abc"[shared % 3]},
            )  # fmt: skip

    def run(self, steps: int, clock: Callable[[], int]) -> float:
        """µs a step, without the clients' part."""
        spent = 0
        for _ in range(steps):
            if self._churn:
                self.fill()
            start = clock()
            self.step()
            took = clock() - start
            self.took(took)
            spent += took
        return spent / steps / 1e3

    def step(self) -> None:
        """What is measured."""
        self.core.step()

    def took(self, ns: int) -> None:
        """A step took so long. Nothing by default."""


def in_turns(sides: Sequence[Side], rounds: int, steps: int) -> Figures:
    """Have them step, a slice each, so that a drift of the machine hits all alike."""
    figures: dict[tuple[str, bool], list[float]] = {(side.name, cpu): [] for side in sides for cpu in (False, True)}
    turns = max(1, steps // SLICE)
    for number in range(rounds):
        for cpu in (False, True):
            clock = time.thread_time_ns if cpu else time.perf_counter_ns
            gc.collect()
            gc.freeze()
            spent = dict.fromkeys((side.name for side in sides), 0.0)
            for turn in range(turns):
                first = (number + turn) % len(sides)
                for side in [*sides[first:], *sides[:first]]:
                    spent[side.name] += side.run(SLICE, clock)
            for name, total in spent.items():
                figures[name, cpu].append(total / turns)
    gc.unfreeze()
    return figures


def medians(figures: Figures, name: str, first: str) -> str:
    """A side's cells under ``HEAD``: medians, and those of the ratios to the first side within each round."""
    cells = []
    for cpu in (False, True):
        ratios = [a / b for a, b in zip(figures[name, cpu], figures[first, cpu], strict=True)]
        cells.append(f"{statistics.median(figures[name, cpu]):>10.1f}{statistics.median(ratios):>8.3f}")
    return "".join(cells)


def asked(description: str | None) -> argparse.Namespace:
    """The command line: ``rounds``, ``steps``, ``quick``, ``step_ms``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="small sizes that prove only that it runs")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time that the model takes for a step")
    options = parser.parse_args()
    options.steps = 40 if options.quick else 200
    if options.quick:
        options.rounds = 2
    return options


def workloads(quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What they are called, and their sizes."""
    for running in (8,) if quick else (8, 64, 256):
        for label, churn, waiting in (("decode", False, 0), ("churn", True, 0), ("queue of 500", True, 500)):
            yield f"{label}, {running} running", {"running": running, "waiting": waiting, "churn": churn}
