"""Where the time of a step goes on a CPU: matrix products, attention, the rest of the kernels, Python.

    python benchmarks/profile_step.py [--workload W1] [--threads N] [--rounds 3] [--option key=value …] [--symbols 20]

The thread that steps is sampled (``perf record``, of Debian's linux-perf) while a workload of ``serve.py`` runs in
process. It takes part in all that the kernels do and waits for the others, so its samples are the steps' wall time.
Medians over rounds, each with prompts of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from _serve_sides import Ours
from _serve_work import Asked, workload

KINDS = (
    ("matrix products", r"kernels-\w+\.so .*(one_tile|linear\()"),
    ("attention", r"kernels-\w+\.so .*(Attention::|attend\()"),
    ("waiting for other threads", r"kernels-\w+\.so .*(Pool::|Team::wait|parallel)"),
    ("norms, rotation", r"kernels-\w+\.so .*(before_attention|after_attention|normalize|rotate)"),
    ("other kernels", r"kernels-\w+\.so"),
    ("torch and numpy", r"libtorch|libc10|torch|numpy|_multiarray"),
    ("system", r"\[kernel|\[guest"),
    ("Python", r""),
)
"""What a sample counts as: the first whose pattern is found in ``library symbol``."""


def sampled(side: Ours, asked: Sequence[Asked]) -> Counter[tuple[str, str]]:
    """Samples of the calling thread during a run, by (library, symbol)."""
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder, "perf.data"))
        command = [
            "perf",
            "record",
            "-q",
            "-F",
            "997",
            "-e",
            "cpu-clock",
            "-t",
            str(threading.get_native_id()),
            "-o",
            data,
        ]
        recorder = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(1.0)  # until it is attached
        side.serve(asked)
        recorder.send_signal(signal.SIGINT)
        recorder.wait(60)
        report = [
            "perf",
            "report",
            "-i",
            data,
            "--no-children",
            "--stdio",
            "-F",
            "sample,dso,symbol",
            "-w",
            "0,200,300",
        ]
        text = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    found: Counter[tuple[str, str]] = Counter()
    for line in text.splitlines():
        if match := re.match(r"\s*(\d+)\s+(\S+)\s+\[.\]\s+(.*\S)", line):
            found[match[2], match[3]] += int(match[1])
    return found


def kind(library: str, symbol: str) -> str:
    """What a symbol's samples count as."""
    return next(name for name, pattern in KINDS if re.search(pattern, f"{library} {symbol}"))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="W1")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--symbols", type=int, default=0, help="also print so many symbols of the last round")
    parser.add_argument("--option", action="append", default=[], help="a flag of engine serve, as key=value")
    args = parser.parse_args()
    if shutil.which("perf") is None:
        parser.error("perf is not installed (Debian: linux-perf)")
    side = Ours(args.option, args.threads)
    side.serve(workload("W3", -1, 0.1))
    shares: defaultdict[str, list[float]] = defaultdict(list)
    found: Counter[tuple[str, str]] = Counter()
    for seed in range(args.rounds):
        found = sampled(side, workload(args.workload, seed, args.scale))
        by_kind: Counter[str] = Counter()
        for (library, symbol), count in found.items():
            by_kind[kind(library, symbol)] += count
        for name, _ in KINDS:
            shares[name].append(by_kind[name] / found.total())
        rest = sum(by_kind[name] for name, _ in KINDS[2:]) / found.total()
        shares["outside products and attention"].append(rest)
    print(f"{args.workload}: the stepping thread's time, {args.threads} threads, {found.total()} samples a round")
    for name, values in shares.items():
        print(f"  {name:<32}{statistics.median(values):>7.1%}")
    for (library, symbol), count in found.most_common(args.symbols):
        print(f"  {count / found.total():>7.1%}  {library}  {symbol[:90]}")


if __name__ == "__main__":
    main()
