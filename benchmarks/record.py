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

import tempfile
import time
from typing import Any

from _turns import HEAD, Side, asked, in_turns, medians, workloads

SIDES = ("off", "memory", "files")


def compare(label: str, rounds: int, steps: int, **sizes: Any) -> None:
    """Measure one workload and print a row a side."""
    with tempfile.TemporaryDirectory() as folder:
        fields: list[dict[str, Any]] = [{}, {"record": True}, {"record_dir": folder}]
        sides = [Side(name, own, **sizes) for name, own in zip(SIDES, fields, strict=True)]
        for side in sides:
            side.fill()
            side.run(60, time.perf_counter_ns)
        figures = in_turns(sides, rounds, steps)
        for side in sides:
            side.core.close()
    for name in SIDES:
        print(f"{label:<34}{name:<8}{medians(figures, name, SIDES[0])}", flush=True)


def main() -> None:
    """Run what the command line asks for."""
    options = asked(__doc__)
    print(f"{'workload':<34}{'record':<8}{HEAD}")
    for label, sizes in workloads(options.quick):
        compare(label, options.rounds, options.steps, step_ms=options.step_ms, **sizes)


if __name__ == "__main__":
    main()
