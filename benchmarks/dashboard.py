"""What the dashboard costs the engine: the same steps without one, with one that nobody looks at, and with a viewer.

    python benchmarks/dashboard.py [--rounds 15] [--quick] [--step-ms MS]

Three engines step in turns, a slice of steps each, so that a drift of the machine hits all alike; printed are medians
over rounds of µs a step, and of the ratios to the engine without a dashboard within each round: wall time, then the
thread's CPU time. The model costs no time (executor ``sim``), so this is the engine's own cost, the hardest measure;
``--step-ms`` gives the model a time, as a real one takes some milliseconds.

``off``: as the engine steps without a dashboard. ``closed``: somebody has looked, and left. ``watched``: somebody
looks, once a second as the server does; a look's own time is in its steps' (once in as many as make a second), and
printed beside, with its bytes on the wire.

``decode``: all rows go on. ``churn``: prompts come and requests end, so that nearly every step decides something new.
``queue``: the same with a long queue.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from engine.core import EngineConfig, SamplingParams
from engine.core.assemble import assemble
from engine.core.loop import EngineCore
from engine.core.serve.messages import DeskAnswer, encode

SIDES = ("off", "closed", "watched")
SLICE = 40  # steps of one side before the next has its turn
EVERY = 1e9  # ns of a side's own time between two looks


class Side:
    """One engine, the clients that keep it busy, and perhaps somebody who looks."""

    def __init__(self, name: str, *, running: int, waiting: int, churn: bool, pages: int, step_ms: float) -> None:
        self.name, self._running, self._waiting, self._churn = name, running, waiting, churn
        self._draw = random.Random(0)
        fields: dict[str, Any] = {
            "executor": {"name": "sim", "max_model_len": 100_000, "step_ms": step_ms}, "kvcache": "radix",
            "num_pages": pages, "max_running": running, "max_batch_tokens": 4096, "max_waiting": 10_000,
        }  # fmt: skip
        self.core: EngineCore = assemble(EngineConfig.model_validate(fields))
        self.looks: list[float] = []  # µs
        self.bytes = 0
        self._since, self._last = EVERY, 0
        if name == "closed":
            self.core.lens.look()
            self.core.lens.close()

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
        """µs a step, without the clients' part: what ``Host`` does around a step, looks included."""
        spent, watched = 0, self.name == "watched"
        lens = self.core.lens
        for _ in range(steps):
            if self._churn:
                self.fill()
            start = clock()
            if watched and self._since >= EVERY:
                self._look()
            began = time.perf_counter()
            self.core.step()
            seconds = time.perf_counter() - began
            if lens.steps is not None:
                lens.stepped(seconds)
            step = clock() - start
            spent, self._since = spent + step, self._since + step
        return spent / steps / 1e3

    def _look(self) -> None:
        began = time.perf_counter_ns()
        look = self.core.lens.look(since=self._last)
        self.bytes = len(encode(DeskAnswer(1, look)))
        self.looks.append((time.perf_counter_ns() - began) / 1e3)
        self._last, self._since = look["step"], 0


def compare(label: str, rounds: int, steps: int, **sizes: Any) -> None:
    """Measure one workload and print a row a side."""
    sides = [Side(name, **sizes) for name in SIDES]
    for side in sides:
        side.fill()
        side.run(60, time.perf_counter_ns)
    figures: dict[tuple[str, bool], list[float]] = {(side.name, cpu): [] for side in sides for cpu in (False, True)}
    for number in range(rounds):
        for cpu in (False, True):
            clock = time.thread_time_ns if cpu else time.perf_counter_ns
            gc.collect()
            gc.freeze()
            spent = dict.fromkeys(SIDES, 0.0)
            turns = max(1, steps // SLICE)
            for turn in range(turns):
                first = (number + turn) % len(sides)
                for side in sides[first:] + sides[:first]:
                    spent[side.name] += side.run(SLICE, clock)
            for name, total in spent.items():
                figures[name, cpu].append(total / turns)
    gc.unfreeze()
    watched = sides[-1]
    for side in sides:
        cells = []
        for cpu in (False, True):
            ratios = [a / b for a, b in zip(figures[side.name, cpu], figures["off", cpu], strict=True)]
            cells.append(f"{statistics.median(figures[side.name, cpu]):>10.1f}{statistics.median(ratios):>8.3f}")
        look = f"{statistics.median(watched.looks):>10.0f}{watched.bytes:>9}" if side is watched else ""
        print(f"{label:<34}{side.name:<9}" + "".join(cells) + look, flush=True)
        side.core.close()


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="small sizes that prove only that it runs")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time that the model takes for a step")
    options = parser.parse_args()
    rounds, steps = (2, 40) if options.quick else (options.rounds, 200)
    head = f"{'wall us':>10}{'ratio':>8}{'cpu us':>10}{'ratio':>8}{'look us':>10}{'bytes':>9}"
    print(f"{'workload':<34}{'side':<9}{head}")
    for running in (8,) if options.quick else (8, 64, 256):
        for label, churn, waiting in (("decode", False, 0), ("churn", True, 0), ("queue of 500", True, 500)):
            compare(
                f"{label}, {running} running", rounds, steps, running=running, waiting=waiting, churn=churn,
                pages=max(1000, running * 100), step_ms=options.step_ms,
            )  # fmt: skip
    if not options.quick:
        compare("churn, 64 running, 100000 pages", rounds, steps, running=64, waiting=0, churn=True, pages=100_000,
                step_ms=options.step_ms)  # fmt: skip


if __name__ == "__main__":
    main()
