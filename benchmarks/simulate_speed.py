"""How fast the simulator is, and who takes the time: scheduler and cache, the rest of a step, the driver.

    python benchmarks/simulate_speed.py [--requests 3000] [--running 256] [--output exp:128] [--rounds 3] [--quick]

Requests that all come at once keep so many running. Printed are requests and steps a second of CPU, of the median
round, and shares of the CPU time: of planning (scheduler, cache, policies), committing, the modelled executor, what
else a step does, and the driver around it. Shares are measured in a run of their own, whose calls are timed.

The first line says how fast this machine is at the moment: million additions a second of a plain loop. Other work on
it shows there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from engine.core import EngineConfig
from engine.lab import Simulation, workload

ROW = "{:<8}{:<8}{:>8}{:>8}{:>9}{:>9}{:>10}   {}"
PAIRS = (("unified", "paged"), ("radix", "radix"))
FEW, MANY = 1000, 10_000_000


class Spent:
    """CPU seconds in calls, by name; those of calls within calls are the inner one's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, its time noted."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.process_time() - began
                self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inner.pop()
                self._inner[-1] += took

        return wrapped


def simulation(args: argparse.Namespace, scheduler: str, kvcache: str) -> Simulation:
    """All at once, so that as many run as may."""
    made = workload(f"batch:requests={args.requests},prompt={args.prompt},output={args.output}")
    config = EngineConfig(
        model="llama-3-8b", scheduler=scheduler, kvcache=kvcache, max_running=args.running, max_waiting=MANY,
        max_waiting_tokens=2**40,
    )  # fmt: skip
    return Simulation(config, made)


def shares(args: argparse.Namespace, scheduler: str, kvcache: str) -> dict[str, float]:
    """Parts of the CPU time."""
    one, spent = simulation(args, scheduler, kvcache), Spent()
    core, executor = one.replicas[0].core, one.replicas[0].executor
    for name, owner, call in (
        ("plan", core, "plan"), ("commit", core, "commit"), ("executor", executor, "launch"), ("step", core, "step"),
        ("add", core, "add"),
    ):  # fmt: skip
        setattr(owner, call, spent.timed(name, getattr(owner, call)))
    total = one.run().cpu
    return {**{name: seconds / total for name, seconds in spent.seconds.items()},
            "driver": 1 - sum(spent.seconds.values()) / total}  # fmt: skip


def yardstick() -> float:
    """Million additions a second."""
    began = time.process_time()
    total = 0
    for number in range(1_000_000):
        total += number
    return 1 / (time.process_time() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--prompt", default="lognormal:512:0.8:4000")
    parser.add_argument("--output", default="exp:128:1000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few requests, one round: to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.rounds = 100, 1
    print(f"{args.requests} requests, prompts {args.prompt}, answers {args.output}; additions {yardstick():.0f} M/s")
    print(ROW.format("", "", "reqs/s", "steps/s", "rows/step", "tokens/s", "us/token", "shares of CPU time"))
    for scheduler, kvcache in PAIRS:
        rounds = sorted(
            (simulation(args, scheduler, kvcache).run() for _ in range(args.rounds)), key=lambda found: found.cpu
        )
        usual = rounds[args.rounds // 2]
        total = usual.summary()
        tokens = sum(one.output for one in usual.requests)
        parts = ", ".join(f"{name} {share:.0%}" for name, share in shares(args, scheduler, kvcache).items())
        cells = (len(usual.requests) / usual.cpu, total["steps"] / usual.cpu, total["rows_a_step"], tokens / usual.cpu)
        print(
            ROW.format(scheduler, kvcache, *(f"{cell:.0f}" for cell in cells), f"{usual.cpu / tokens * 1e6:.1f}", parts)
        )


if __name__ == "__main__":
    main()
