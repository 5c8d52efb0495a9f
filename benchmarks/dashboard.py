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

import statistics
import time
from typing import Any

from _turns import HEAD, Side, asked, in_turns, medians, workloads

from engine.core.serve.messages import DeskAnswer, encode

SIDES = ("off", "closed", "watched")
EVERY = 1e9  # ns of a side's own time between two looks


class Watched(Side):
    """An engine that somebody looks at, or has looked at, or never."""

    def __init__(self, name: str, *, pages: int, **sizes: Any) -> None:
        super().__init__(name, {"kvcache": "radix", "num_pages": pages}, **sizes)
        self.looks: list[float] = []  # µs
        self.bytes = 0
        self._since, self._last = EVERY, 0
        if name == "closed":
            self.core.lens.look()
            self.core.lens.close()

    def step(self) -> None:
        """What ``Host`` does around a step, looks included."""
        lens = self.core.lens
        if self.name == "watched" and self._since >= EVERY:
            self._look()
        began = time.perf_counter()
        self.core.step()
        seconds = time.perf_counter() - began
        if lens.steps is not None:
            lens.stepped(seconds)

    def took(self, ns: int) -> None:
        """The next look comes after as many steps as make a second."""
        self._since += ns

    def _look(self) -> None:
        began = time.perf_counter_ns()
        look = self.core.lens.look(since=self._last)
        self.bytes = len(encode(DeskAnswer(1, look)))
        self.looks.append((time.perf_counter_ns() - began) / 1e3)
        self._last, self._since = look["step"], 0


def compare(label: str, rounds: int, steps: int, **sizes: Any) -> None:
    """Measure one workload and print a row a side."""
    sides = [Watched(name, **sizes) for name in SIDES]
    for side in sides:
        side.fill()
        side.run(60, time.perf_counter_ns)
    figures = in_turns(sides, rounds, steps)
    watched = sides[-1]
    for side in sides:
        look = f"{statistics.median(watched.looks):>10.0f}{watched.bytes:>9}" if side is watched else ""
        print(f"{label:<34}{side.name:<9}{medians(figures, side.name, SIDES[0])}{look}", flush=True)
        side.core.close()


def main() -> None:
    """Run what the command line asks for."""
    options = asked(__doc__)
    rounds, steps, step_ms = options.rounds, options.steps, options.step_ms
    print(f"{'workload':<34}{'side':<9}{HEAD}{'look us':>10}{'bytes':>9}")
    for label, sizes in workloads(options.quick):
        compare(label, rounds, steps, step_ms=step_ms, pages=max(1000, sizes["running"] * 100), **sizes)
    if not options.quick:
        compare("churn, 64 running, 100000 pages", rounds, steps, step_ms=step_ms, pages=100_000, running=64,
                waiting=0, churn=True)  # fmt: skip


if __name__ == "__main__":
    main()
