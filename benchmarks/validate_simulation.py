"""Simulated against real: the default model on this machine's CPU, measured, fitted, simulated; how far that is off.

    python benchmarks/validate_simulation.py [--rounds 2] [--threads N] [--rates 0.5,1.5] [--quick] [--json FILE]
        [--scheduler unified --kvcache paged] [--keep FOLDER] [--cpu]

W1, W2 and W4 of ``serve.py``, and Poisson arrivals at two rates. Each is run once to fit the cost of a step to (the
decision log of it), and ``--rounds`` times, with other prompts, to be judged. What is judged is simulated with the
arrival times that it really had. Two turns of fitting frame the judged runs, so that a machine that drifts is seen: the
second table's errors say how well the cost fits steps that it was not fitted to.

``--cpu`` measures the CPU time of one thread instead of time, for a machine that others use, too (waiting is skipped).
It is still no quiet machine: others take memory bandwidth and caches.

Wanted: means of TTFT and ITL within 15 %, 99th percentiles within 30 %. Exit status 1 where one is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from _serve_work import workload as asked_of

from engine.core import EngineConfig, EngineCore, SamplingParams, assemble, load_config
from engine.core.config import Selection
from engine.lab import Arrival, Fitted, Piece, Workload, errors, fit, read_log, simulate, steps_of, workload
from engine.lab.arrivals import seed_of, tokens_of
from engine.lab.executor import WHERE

MEAN, P99 = 0.15, 0.30
FIRST, VOCAB = 100, 40_000  # token ids of prompts
OWN = ("W1", "W2", "W4")
SIZES = "prompt=lognormal:128:0.6:800,output=exp:32:128"
ROW = "{:<14}{:<10}{:>12}{:>12}{:>9}   {}"


@dataclass(frozen=True, slots=True)
class Wish:
    """A request of a run: its prompt as pieces, and when it comes: at a time, or once the first stream has said
    ``after`` tokens."""

    pieces: tuple[Piece, ...]
    tokens: list[int]
    output: int
    at: float = 0.0
    after: int = 0


class Now:
    """Seconds.

    Args:
        cpu: of this thread's CPU time, and waiting is over at once; else of the machine's time.
    """

    def __init__(self, cpu: bool) -> None:
        self._cpu, self._skipped = cpu, 0.0

    def __call__(self) -> float:
        return time.thread_time() + self._skipped if self._cpu else time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        if self._cpu:
            self._skipped += seconds
        else:
            time.sleep(seconds)


@dataclass(slots=True)
class Seen:
    """Waiting times of runs of one kind, in seconds."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Means and 99th percentiles."""
        both = {"ttft": np.array(self.ttft), "itl": np.array(self.itl)}
        return {f"{name} {what}": float(how(values)) for name, values in both.items()
                for what, how in (("mean", np.mean), ("p99", lambda found: np.percentile(found, 99)))}  # fmt: skip


def wishes(name: str, seed: int, quick: bool) -> list[Wish]:
    """What a run is asked for. ``name`` is one of ``serve.py``'s workloads, or a rate."""
    scale = 0.25 if quick else 1.0
    if name not in OWN:
        rate, count = float(name), 12 if quick else 60
        made = workload(f"poisson:rate={rate},requests={count},{SIZES}", seed_of(seed, name))  # no prompt twice
        return [Wish(one.prompt, tokens_of(one.prompt, VOCAB, FIRST), one.output, one.at) for one in made]
    asked = asked_of(name, seed, scale)
    first, second = asked[0].prompt, asked[1].prompt
    same = next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
    shared = (Piece(seed_of(seed, name), same),) if same else ()
    return [
        Wish((*shared, Piece(seed_of(seed, name, at), len(one.prompt) - same)), one.prompt, one.output, after=one.after)
        for at, one in enumerate(asked)
    ]


def run(core: EngineCore, clock: Now, asked: Sequence[Wish], seen: Seen) -> Workload:
    """Serve it for real; returns it with the times at which requests came."""
    waiting, came, times = list(range(len(asked))), [0.0] * len(asked), [[] for _ in asked]
    places: dict[str, int] = {}
    began = clock()
    while waiting or core.has_work:
        now = clock() - began
        while waiting and asked[waiting[0]].at <= now and asked[waiting[0]].after <= len(times[0]):
            at = waiting.pop(0)
            one = asked[at]
            came[at] = one.at if one.at else clock() - began
            params = SamplingParams(temperature=0, max_tokens=one.output, ignore_eos=True)
            places[core.add(one.tokens, params, arrival=began + came[at]).id] = at
        if not core.has_work:
            clock.sleep(max(0.0, asked[waiting[0]].at - (clock() - began)))
            continue
        deltas = core.step()
        now = clock() - began
        for delta in deltas:
            times[places[delta.request_id]] += [now] * len(delta.tokens)
    for at, own in enumerate(times):
        seen.ttft.append(own[0] - came[at])
        seen.itl += np.diff(own).tolist()
    return Workload([Arrival(f"r{at}", came[at], one.pieces, one.output) for at, one in enumerate(asked)])


def logged(core: EngineCore, clock: Now, asked: Sequence[Wish], folder: Path) -> list[Any]:
    """Serve it with its decisions recorded; returns its steps."""
    core.record.on(folder=folder)
    try:
        run(core, clock, asked, Seen())
    finally:
        core.record.close()
    return steps_of(read_log(folder))


def simulated(core: EngineCore, config: EngineConfig, made: Workload, cost: Fitted, seen: Seen) -> None:
    """The same on modelled time, with the same limits."""
    names = ("num_pages", "page_size", "max_batch_tokens", "max_running")
    executor = Selection(name=WHERE, options={"host_ms": 0.0})
    alike = config.model_copy(update={**{n: getattr(core.limits, n) for n in names}, "executor": executor})
    results = simulate(alike, made, cost=cost)
    seen.ttft += [one.ttft for one in results.requests if one.ttft is not None]
    seen.itl += results.gaps.tolist()


def table(real: dict[str, Seen], modelled: dict[str, Seen]) -> tuple[list[dict[str, Any]], bool]:
    """Print it; returns its rows, and whether all is as wanted."""
    print(ROW.format("workload", "of", "real, ms", "simulated", "error", "wanted"))
    rows, good = [], True
    for name, seen in real.items():
        for what, value in seen.figures().items():
            said = modelled[name].figures()[what]
            off, wanted = said / value - 1, MEAN if what.endswith("mean") else P99
            kept = abs(off) <= wanted
            good &= kept
            verdict = f"within {wanted:.0%}" + ("" if kept else ": NO")
            print(ROW.format(name, what, f"{value * 1e3:.1f}", f"{said * 1e3:.1f}", f"{off:+.1%}", verdict))
            rows.append({"workload": name, "of": what, "real": value, "simulated": said, "error": off, "kept": kept})
    return rows, good


def measure(args: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], bool]:
    """All of it."""
    flags: dict[str, Any] = {"scheduler": args.scheduler, "kvcache": args.kvcache}
    clock = Now(args.cpu)
    if args.cpu:
        args.threads = 1
    if args.threads:
        flags["executor.threads"] = str(args.threads)
    config = load_config(flags=flags).config
    names = [*OWN, *args.rates]
    core = assemble(config, clock=clock, sleep=clock.sleep)
    real, modelled = ({f"Poisson {name}/s" if name not in OWN else name: Seen() for name in names} for _ in range(2))
    try:
        run(core, clock, wishes("W1", 9999, True), Seen())  # the first run of all allocates, and may compile
        before = [
            step for name in names for step in logged(core, clock, wishes(name, 1000, args.quick), folder / f"a{name}")
        ]
        judged = []
        for seed in range(args.rounds):
            for name, seen in zip(names, real.values(), strict=True):
                judged.append((name, run(core, clock, wishes(name, seed, args.quick), seen)))
                print(f"# round {seed + 1} {name}: {len(seen.ttft)} requests", file=sys.stderr, flush=True)
        after = [
            step for name in names for step in logged(core, clock, wishes(name, 2000, args.quick), folder / f"b{name}")
        ]
    finally:
        core.close()
    cost = fit([*before, *after])
    keys = dict(zip(names, real, strict=True))
    for name, made in judged:
        simulated(core, config, made, cost, modelled[keys[name]])
    rows, good = table(real, modelled)
    print(f"\nthe cost: {json.dumps({name: round(value * 1e6, 4) for name, value in cost.weights.items()})} µs, "
          f"knee at {cost.knee} tokens")  # fmt: skip
    print(f"fitted to {cost.about['steps']} steps, {cost.about['left_out']} left out")
    print(f"on them:                                     {errors(cost, [*before, *after])}")
    print(f"fitted to those before, on those afterwards: {errors(fit(before), after)}")
    return rows, good


def main() -> None:
    """Measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, help="of the executor (default: its own choice)")
    parser.add_argument("--rates", type=lambda text: text.split(","), default=["0.5", "1.5"], help="requests a second")
    parser.add_argument("--scheduler", default="unified")
    parser.add_argument("--kvcache", default="paged")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs")
    parser.add_argument("--cpu", action="store_true", help="count the CPU time of one thread")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the decision logs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, good = measure(args, args.keep or Path(folder))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
