"""What the plugin system costs: µs a step in plan and commit at N running requests, without and with policies.

    python benchmarks/hook_cost.py [--running 256] [--rounds 15]

Three engines on the ``sim`` executor: without policies, with one that answers every hook with nothing, and with five
that have work to do. They take turns, 50 decode steps a round, so that a drift of the machine hits all; printed are
medians over rounds and the median of the ratio to the first. Beside them: one ask of the bus and one pluggy dispatch of
the same hook.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace

from engine.core import EngineConfig, EngineCore, SamplingParams
from engine.core.assemble import assemble

POLICIES: dict[str, list[str]] = {
    "none": [],
    "do-nothing": ["engine.testing:DoNothing"],
    "five": ["fair-share", "early-reject", "past-future", "soft-retention", "least-recompute"],
}


def make(scheduler: str, kvcache: str, running: int, policies: list[str]) -> EngineCore:
    """An engine in steady decode with ``running`` requests, and as many waiting behind them."""
    config = EngineConfig(
        executor={"name": "sim", "max_model_len": 100_000},
        scheduler=scheduler,
        kvcache=kvcache,
        max_running=running,
        max_batch_tokens=max(2048, 2 * running),
        num_pages=200_000,
        max_waiting=10_000,
        policies=policies,
    )
    core = assemble(config)
    for number in range(2 * running):
        core.add([number % 1000] * 32, SamplingParams(max_tokens=90_000, seed=number))
    while len(core.running) < running or any(request.debt != 1 for request in core.running):
        core.step()
    return core


def decode(core: EngineCore, steps: int) -> tuple[float, float, float]:
    """(plan, execute, commit) in µs a step."""
    clock = time.perf_counter
    spent = [0.0, 0.0, 0.0]
    for _ in range(steps):
        start = clock()
        plan = core.plan()
        planned = clock()
        outcome = core.executor.execute(plan)
        executed = clock()
        core.commit(outcome)
        core.take_deltas()
        end = clock()
        spent = [spent[0] + planned - start, spent[1] + executed - planned, spent[2] + end - executed]
    return tuple(value * 1e6 / steps for value in spent)


def asks(core: EngineCore) -> tuple[float, float]:
    """µs of one ``order`` ask: through the bus, and through pluggy's own dispatch."""
    step, waiting, rounds = SimpleNamespace(view=None), (), 20_000
    bus, hook = core.hooks, core.hooks.manager.hook.order
    start = time.perf_counter()
    for _ in range(rounds):
        bus.ask_order(step, waiting)
    middle = time.perf_counter()
    for _ in range(rounds):
        hook(step=step, waiting=waiting)
    return (middle - start) * 1e6 / rounds, (time.perf_counter() - middle) * 1e6 / rounds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(f"{arguments.running} running, {arguments.running} waiting, decode steps; µs a step (medians)")
    print(f"{'scheduler':<10}{'cache':<8}{'policy':<12}{'plan':>8}{'commit':>8}{'both':>8}   ratio with/without")
    for scheduler in ("unified", "radix"):
        for kvcache in ("paged", "radix"):
            cores = [make(scheduler, kvcache, arguments.running, policies) for policies in POLICIES.values()]
            rounds = [[decode(core, 50) for core in cores] for _ in range(arguments.rounds)]
            for which, label in enumerate(POLICIES):
                plan = statistics.median(row[which][0] for row in rounds)
                commit = statistics.median(row[which][2] for row in rounds)
                ratio = statistics.median((row[which][0] + row[which][2]) / (row[0][0] + row[0][2]) for row in rounds)
                tail = f"{ratio:>10.2f}" if which else ""
                print(f"{scheduler:<10}{kvcache:<8}{label:<12}{plan:>8.0f}{commit:>8.0f}{plan + commit:>8.0f}{tail}")
            if (scheduler, kvcache) == ("unified", "paged"):
                bus, dispatch = asks(cores[1])
                print(f"  one ask of 'order': bus {bus:.2f} µs, pluggy dispatch {dispatch:.2f} µs")
            for core in cores:
                core.close()


if __name__ == "__main__":
    main()
