"""The experiments of the field, each a decision tried on the same arrivals: results, plots and pages.

    python benchmarks/experiments/run.py [NAMES] [--quick] [--real] [--page-only] [--seeds 1,2,3] [--docs FOLDER]

Without ``--real`` everything is simulated (``docs/lab.md``): Llama 3 8B on an H100, where an experiment says nothing
else. With it the same sides run on the default model on this machine's CPU, small: that wants a machine that does
nothing else. Results are kept as ``FOLDER/data/NAME.json`` (default: ``docs/experiments``), of the two kinds side by
side; pages and plots are made from these, with ``--page-only`` from those that are there. ``--quick`` takes a tenth of
the requests and one seed: to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from _kit import SEEDS, Case, Experiment, Figures, Side, simulated

NAMES = (
    "batching", "chunk_size", "phases", "queue_order", "reservation", "admission", "priority", "overlap", "page_size",
    "twins",
)  # fmt: skip
QUICK = 0.1
FOLDER = Path(__file__).resolve().parents[2] / "docs" / "experiments"

Run = Callable[[Case, Side, int], Figures]


def experiment(name: str) -> Experiment:
    """One of ``NAMES``."""
    found: Experiment = import_module(name).EXPERIMENT
    return found


def rows_of(cases: Sequence[Case], sides: Sequence[Side], seeds: Sequence[int], run: Run) -> list[dict[str, Any]]:
    """Each side of each case at each seed. Sides take turns, so that a machine that drifts drifts for all."""
    rows = []
    for case in cases:
        found: dict[str, dict[str, list[float]]] = {side.name: {} for side in sides}
        for seed in seeds:
            for side in sides:
                for name, value in run(case, side, seed).items():
                    found[side.name].setdefault(name, []).append(float(f"{value:.4g}"))
        rows.append({"workload": case.workload, "x": case.x, "sides": found})
        told = ", ".join(f"{name} {sum(own['goodput']) / len(seeds):.2f}" for name, own in found.items())
        print(f"#   {case.workload} {case.x:g}: {told}", file=sys.stderr, flush=True)
    return rows


def try_one(one: Experiment, args: argparse.Namespace) -> dict[str, Any]:
    """Run what is asked for; returns what is added to the data file."""
    seeds = args.seeds or list(SEEDS[:2] if args.real else SEEDS)
    seeds = seeds[:1] if args.quick else seeds
    began, cpu = time.monotonic(), time.process_time()
    if args.real:
        from _real import Machine

        machine = Machine()
        rows = rows_of(one.real, one.tried(), seeds, machine.run)
        made: dict[str, Any] = {"real": {"seeds": seeds, "rows": rows, **machine.about()}}
    else:
        scale = QUICK if args.quick else args.part

        def run(case: Case, side: Side, seed: int) -> Figures:
            return simulated(case, side, seed, scale, cpu=one.cpu)

        made = {"simulated": {"seeds": seeds, "scale": scale, "rows": rows_of(one.cases, one.sides, seeds, run)}}
    print(f"# {one.name}: {time.monotonic() - began:.0f} s, {time.process_time() - cpu:.0f} s of CPU", file=sys.stderr)
    return made


def seeds_of(text: str) -> list[int]:
    """``1,2,3``."""
    return [int(one) for one in text.split(",")]


def main() -> None:
    """Run, keep, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAMES", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, one seed")
    parser.add_argument("--real", action="store_true", help="the default model on this CPU instead of the simulator")
    parser.add_argument("--page-only", action="store_true", help="run nothing: pages and plots from what is kept")
    parser.add_argument("--no-pages", action="store_true", help="keep the figures only")
    parser.add_argument("--part", type=float, default=1.0, help="of the requests")
    parser.add_argument("--seeds", type=seeds_of, help="default: 1,2,3 simulated, 1,2 real")
    parser.add_argument("--docs", type=Path, default=FOLDER, help="folder of pages, plots and data")
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"no experiment {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")
    (args.docs / "data").mkdir(parents=True, exist_ok=True)
    chosen = [experiment(name) for name in args.names or NAMES]
    for one in () if args.page_only else chosen:
        file = args.docs / "data" / f"{one.name}.json"
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        print(f"# {one.name}", file=sys.stderr, flush=True)
        kept |= try_one(one, args)
        file.write_text(compact(kept), encoding="utf-8")
    if not args.no_pages:
        from _pages import write

        write(chosen, [experiment(name) for name in NAMES], args.docs)


def compact(kept: dict[str, Any]) -> str:
    """JSON with a line for each side of a row: small, and a change of one is a change of its line."""
    text = json.dumps(kept, separators=(",", ":"))
    for mark in ('{"workload"', '"real":', '"simulated":'):
        text = text.replace(mark, f"\n{mark}")
    return text.replace(']},"', ']},\n  "') + "\n"


if __name__ == "__main__":
    main()
