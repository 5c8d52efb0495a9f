"""What recording decisions costs: the same steps with the record off, on (in memory), and on with files.

    python benchmarks/record.py [--rounds 15] [--quick] [--step-ms MS]

Three engines step in turns, a slice of steps each, so that a drift of the machine hits all alike; printed are medians
over rounds of µs a step, and of the ratios to the engine without a record within each round: wall time, then the
thread's CPU time. The model costs no time (executor ``sim``), so this is the engine's own cost, the hardest measure;
``--step-ms`` gives the model a time, as a real one takes some milliseconds. With files, a thread writes beside the
engine's.

``decode``: all rows go on. ``churn``: prompts come and requests end, so that nearly every step decides something new.
``queue``: the same with a long queue.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from engine.core import EngineConfig, SamplingParams
from engine.core.assemble import assemble
from engine.core.loop import EngineCore

SIDES = ("off", "memory", "files")
SLICE = 40  # steps of one side before the next has its turn


class Side:
    """One engine, and the clients that keep it busy."""

    def __init__(self, name: str, folder: Path, *, running: int, waiting: int, churn: bool, step_ms: float) -> None:
        record = {"off": {}, "memory": {"record": True}, "files": {"record_dir": str(folder)}}[name]
        self.name, self._running, self._waiting, self._churn = name, running, waiting, churn
        self._draw = random.Random(0)
        self.core: EngineCore = assemble(
            EngineConfig.model_validate(
                {
                    "executor": {"name": "sim", "max_model_len": 100_000, "step_ms": step_ms},
                    "num_pages": running * 100, "max_running": running, "max_batch_tokens": 4096, "max_waiting": 10_000,
                    **record,
                }
            )
        )  # fmt: skip

    def fill(self) -> None:
        """Requests come until as many are here as shall be."""
        core, draw = self.core, self._draw
        while len(core.requests) < self._running + self._waiting:
            length = draw.randrange(200, 400)
            shared = draw.randrange(4)
            output = draw.randrange(20, 120) if self._churn else 10**5
            core.add(
                [shared] * 64 + [draw.randrange(1000) for _ in range(length)],
                SamplingParams(max_tokens=min(output, 90_000), ignore_eos=True), metadata={"tenant": "abc"[shared % 3]},
            )  # fmt: skip

    def run(self, steps: int, clock: Callable[[], int]) -> float:
        """µs a step, without the clients' part."""
        spent = 0
        for _ in range(steps):
            if self._churn:
                self.fill()
            start = clock()
            self.core.step()
            spent += clock() - start
        return spent / steps / 1e3


def compare(label: str, rounds: int, steps: int, step_ms: float, **sizes: int | bool) -> None:
    """Measure one workload and print a row a side."""
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(name, Path(folder), step_ms=step_ms, **sizes) for name in SIDES]  # type: ignore[arg-type]
        for side in sides:
            side.fill()
            side.run(60, time.perf_counter_ns)
        figures = {(side.name, cpu): [] for side in sides for cpu in (False, True)}
        for number in range(rounds):
            for cpu in (False, True):
                clock = time.thread_time_ns if cpu else time.perf_counter_ns
                gc.collect()
                gc.freeze()
                spent = dict.fromkeys(SIDES, 0.0)
                for turn in range(max(1, steps // SLICE)):
                    order = sides[(number + turn) % 3 :] + sides[: (number + turn) % 3]
                    for side in order:
                        spent[side.name] += side.run(SLICE, clock)
                for name, total in spent.items():
                    figures[name, cpu].append(total / max(1, steps // SLICE))
        gc.unfreeze()
        for side in sides:
            side.core.close()
    for name in SIDES:
        cells = []
        for cpu in (False, True):
            ratios = [a / b for a, b in zip(figures[name, cpu], figures["off", cpu], strict=True)]
            cells.append(f"{statistics.median(figures[name, cpu]):>10.1f}{statistics.median(ratios):>8.3f}")
        print(f"{label:<34}{name:<8}" + "".join(cells), flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="small sizes that prove only that it runs")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time that the model takes for a step")
    options = parser.parse_args()
    rounds, steps = (2, 40) if options.quick else (options.rounds, 200)
    print(f"{'workload':<34}{'record':<8}{'wall us':>10}{'ratio':>8}{'cpu us':>10}{'ratio':>8}")
    for running in (8,) if options.quick else (8, 64, 256):
        for label, churn, waiting in (("decode", False, 0), ("churn", True, 0), ("queue of 500", True, 500)):
            compare(
                f"{label}, {running} running", rounds, steps, options.step_ms,
                running=running, waiting=waiting, churn=churn,
            )  # fmt: skip


if __name__ == "__main__":
    main()
