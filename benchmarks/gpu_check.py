"""Checks and times everything that runs on a GPU, in under five minutes.

    python benchmarks/gpu_check.py [--device cuda:0] [--only kernels,tokens] [--cpu] [--model NAME]

Prints what is here and what it reaches (a copy, a matrix product); the conformance suite of every attention backend on
the device, errors against float64, times beside those peaks; tokens of the executor against the CPU's; its speed with
and without graphs and overlap, with the time that the device has nothing to do between two steps; that memory stays.

Exit code: 0 all checks held, 1 one failed, 2 there is no GPU here, 3 none failed, and the time did not suffice for all.
``--cpu`` runs the same on the CPU in tiny sizes: a test of this script, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from _gpu_executor import memory, same_tokens, speed
from _gpu_kernels import Able, able, each, errors, suites, times
from _gpu_report import Report, environment

SECTIONS = ("suites", "kernels", "times", "tokens", "speed", "memory")
LIMIT = 280.0  # seconds


def run(report: Report, model: str, only: tuple[str, ...]) -> int:
    """Every section that is asked for; the exit code."""
    peaks: dict[str, float] = {}
    backends: Able = {}
    with report.section("environment"):
        peaks = environment(report)
    with report.section("attention backends"):
        backends = able(report)
    works: dict[str, tuple[str, Callable[[], None]]] = {
        "kernels": ("errors against float64", lambda: errors(report, backends)),
        "tokens": ("tokens against the CPU", lambda: same_tokens(report, model, each(backends))),
        "speed": ("speed of the executor", lambda: speed(report, model)),
        "times": ("times of attention", lambda: times(report, backends, peaks)),
        "memory": ("memory", lambda: memory(report, model)),
        "suites": ("conformance of attention", lambda: suites(report, backends)),  # last: the longest
    }
    for name, (title, work) in works.items():
        if name not in only:
            continue
        if report.late:
            report.leave(f"{title}: the time is up")
            continue
        with report.section(title):
            work()
    print(f"\n{len(report.failed)} failed, {len(report.left)} not tried")
    for words in report.failed:
        print(f"FAILED: {words}")
    for words in report.left:
        print(f"not tried: {words}")
    return 1 if report.failed else 3 if report.late and report.left else 0


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU, to try this script")
    parser.add_argument("--only", default=",".join(SECTIONS), help="some of the sections")
    parser.add_argument("--model", default="default")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which nothing more is begun")
    given = parser.parse_args()
    only = tuple(given.only.split(","))
    if unknown := set(only) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    if not given.cpu and not torch.cuda.is_available():
        print("no GPU here: nothing was run")
        return 2
    device = torch.device("cpu" if given.cpu else given.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return run(Report(device, given.cpu, time.monotonic() + given.limit), given.model, only)


if __name__ == "__main__":
    sys.exit(main())
