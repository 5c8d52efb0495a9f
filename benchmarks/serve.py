"""Output tokens a second and waiting times of whole engines on one model, on this machine's CPU.

    python benchmarks/serve.py [--rounds 3] [--workloads W1,W2,W3,W4] [--quick] [--threads N] [--json FILE]
        [--page docs/performance.md]
        [--side ours-server --side ours:weights=int8 …]
        [--side vllm:python=V/bin/python --side vllm-server:python=V/bin/python]
        [--side llama-server:binary=B/llama-server,model=F32.gguf]

A side is a name and options: ``ours`` and ``ours-server`` (in process, and over HTTP; flags of ``engine serve``),
``generate`` and ``continuous`` (transformers), ``vllm`` and ``vllm-server`` (from an environment of their own),
``llama-server``. ``label=`` names a side in the tables.

Each engine is in a process of its own; they take turns, one working at a time while all others are stopped, in another
order each round, so that a drift of the machine hits all. Printed are medians over rounds. Greedy, no end of sequence,
prompts of random tokens that are others in each round: every run is cold.

The roofline is what this machine could do at most: matrix products at the rate of the kernels' best case, and weights
read once a step at the rate at which memory is read. Whoever says other tokens than the first side of its kind (in
process: tokens; servers: text) is named, with the share of requests that are the same throughout.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _serve_sides import SIDES, pairs
from _serve_work import WORKLOADS, workload

SIDE = Path(__file__).with_name("_serve_sides.py")
MATRIX, EMBEDDED = 106_203_456, 28_311_552  # numbers in the default model's layers, and in its output embedding
COLUMNS = "{:<5}{:<44}{:>9}{:>9}{:>10}{:>10}{:>10}{:>10}   {}"
HEAD = COLUMNS.format("", "engine", "tokens/s", "of best", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "same tokens")


class Engine:
    """A side's process, and those that it has started. Stopped but for when it is asked.

    Args:
        wanted: ``NAME:key=value,…``.
        model: a directory with the model, for those that need one.
    """

    def __init__(self, wanted: str, threads: int, model: str) -> None:
        side, _, options = wanted.partition(":")
        given = pairs([part for part in options.split(",") if part])
        self.label = given.pop("label", wanted if "/" not in wanted else side)
        python = given.get("python", sys.executable) if side == "vllm" else sys.executable
        if side.startswith("vllm"):
            given.setdefault("model", model)
        command = [python, str(SIDE), side, str(threads), *(f"{key}={value}" for key, value in given.items())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        self.about = self._answer()["about"]
        self._signal(signal.SIGSTOP)

    def serve(self, name: str, seed: int, scale: float) -> dict[str, Any]:
        """One run."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"workload": name, "seed": seed, "scale": scale}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait(60)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.label} ended: exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def roofline(threads: int) -> dict[str, float]:
    """GF/s of a product of 480 rows with [1536, 576] in float32, GB/s of reading 2^27 numbers: best of several."""
    from engine.core.native import LinearSpec, kernels

    compiled = kernels()
    n, k, rows = 1536, 576, 480
    memory, x, y = np.ones(n * k, np.float32), np.ones((rows, k), np.float32), np.empty((rows, n), np.float32)
    spec = LinearSpec(weight=memory.ctypes.data, n=n, k=k)
    many, where = np.ones((threads * 4, 2**27 // (threads * 4)), np.float32), np.empty(threads * 4, np.int64)

    def least(work: Any, times: int) -> float:
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    product = least(lambda: compiled.linear(ctypes.byref(spec), x.ctypes.data, k, rows, y.ctypes.data, threads), 30)
    read = least(lambda: compiled.largest(many.ctypes.data, *many.shape, where.ctypes.data, threads), 8)
    return {"gflops": 2 * n * k * rows / product / 1e9, "gbytes": many.nbytes / read / 1e9}


def bound(name: str, scale: float, machine: dict[str, float]) -> float:
    """Tokens a second of a workload that all arrives at once, with nothing but float32 matrix products."""
    asked = workload(name, 0, scale)
    ends = (min(one.prompt for one in asked), max(one.prompt for one in asked))
    shared = next(
        (at for at, (a, b) in enumerate(zip(*ends, strict=False)) if a != b), 0
    )  # what these two share, all do
    prompts = shared + sum(len(one.prompt) - shared for one in asked)
    flops, streams = machine["gflops"] * 1e9, len(asked)
    seconds = (2 * MATRIX * prompts + 2 * EMBEDDED * streams) / flops
    numbers = MATRIX + EMBEDDED
    step = max(2 * numbers * streams / flops, 4 * numbers / (machine["gbytes"] * 1e9))
    output = asked[0].output
    return streams * output / (seconds + (output - 1) * step)


@contextlib.contextmanager
def engines(args: argparse.Namespace) -> Iterator[list[Engine]]:
    """All that are to be compared."""
    made: list[Engine] = []
    with tempfile.TemporaryDirectory() as folder:
        if any(side.startswith("vllm") for side in args.side):
            subprocess.run([sys.executable, "-c", f"import _serve_sides; _serve_sides.export({folder!r})"],
                           cwd=SIDE.parent, check=True)  # fmt: skip
        try:
            for side in args.side:
                made.append(Engine(side, args.threads, folder))
            yield made
        finally:
            for engine in made:
                engine.close()


def measure(args: argparse.Namespace, sides: Sequence[Engine]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Workload -> engine -> figures of each round."""
    scale = 0.1 if args.quick else 1.0
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in args.workloads}
    for side in sides:
        side.serve("W3", -1, 0.1)  # the first run of all allocates, and may compile
    for seed in range(args.rounds):
        for name in args.workloads:
            turn = list(sides)
            for side in turn[seed % len(turn) :] + turn[: seed % len(turn)]:
                figures = side.serve(name, seed, scale)
                print(f"# round {seed + 1} {name} {side.label}: {summary(figures)}", file=sys.stderr, flush=True)
                found[name].setdefault(side.label, []).append(figures)
    return found


def summary(figures: dict[str, Any]) -> str:
    """A run in a few words."""
    return figures.get("cannot") or f"{figures['tokens_per_second']:.1f} tokens/s"


def table(found: dict[str, dict[str, list[dict[str, Any]]]], bounds: dict[str, float]) -> Iterator[str]:
    """Lines to print; fills in the medians."""
    yield HEAD
    for name, sides in found.items():
        runs = {label: rounds for label, rounds in sides.items() if "cannot" not in rounds[0]}
        medians = {label: middle(rounds) for label, rounds in runs.items()}
        best = max((values["tokens_per_second"] or 0 for values in medians.values()), default=0)
        firsts: dict[type, list[dict[str, Any]]] = {}  # what is said in tokens is compared with tokens, text with text
        for label, values in medians.items():
            rate = values["tokens_per_second"] or 0
            same = alike(firsts.setdefault(type(runs[label][0]["said"][0]), runs[label]), runs[label])
            shown = waits(values, " ms", unknown="-")
            yield COLUMNS.format(name, label, f"{rate:.1f}", f"{rate / best:.0%}", *shown, same)
        for label, rounds in sides.items():
            if "cannot" in rounds[0]:
                yield COLUMNS.format(name, label, "-", "", "", "", "", "", rounds[0]["cannot"])
        if name in bounds:
            yield COLUMNS.format(name, "(roofline, fp32)", f"{bounds[name]:.1f}", "", "", "", "", "", WORKLOADS[name])


def page(found: dict[str, dict[str, list[dict[str, Any]]]], bounds: dict[str, float], machine: str) -> str:
    """The figures as a page of the docs."""
    lines = [
        "# Performance on a CPU", "",
        f"Output tokens a second, waiting times in ms, medians: {machine}. The default model, greedy, prompts cold.",
        "Engines took turns in one run, so rows of one workload can be compared with each other, not with other runs.",
        "TTFT: until the first token; ITL: between tokens, of streams that run while others arrive, for servers",
        "between their events. This page is written by `benchmarks/serve.py --page`.", "",
    ]  # fmt: skip
    for name, sides in found.items():
        lines += [f"## {name}: {WORKLOADS[name]}", ""]
        lines += [
            "| engine | tokens/s | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 | runs |",
            "|---|---|---|---|---|---|---|",
        ]
        for label, rounds in sides.items():
            if "cannot" in rounds[0]:
                lines.append(f"| {label} | {rounds[0]['cannot']} | | | | | |")
                continue
            values = middle(rounds)
            shown = " | ".join(waits(values))
            lines.append(f"| {label} | {values['tokens_per_second']:.1f} | {shown} | {len(rounds)} |")
        if name in bounds:
            lines.append(f"| roofline of float32 | {bounds[name]:.1f} | | | | | |")
        lines.append("")
    return "\n".join(lines)


def middle(rounds: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The median of every figure."""
    keys = [key for key in rounds[0] if key != "said"]
    return {key: None if rounds[0][key] is None else statistics.median(one[key] for one in rounds) for key in keys}


def waits(values: dict[str, float | None], unit: str = "", unknown: str = "") -> list[str]:
    """TTFT and ITL, each the median and the 99th percentile."""
    known = (values[key] for key in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"))
    return [unknown if wait is None else f"{wait:.0f}{unit}" for wait in known]


def alike(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> str:
    """How many requests were answered with the same tokens."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a["said"], b["said"], strict=True)]
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=[*WORKLOADS])
    parser.add_argument("--side", action="append", metavar="NAME:key=value,…", help="an engine, and its options")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--page", type=Path, help="write the medians there as a page of the docs")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="a try: all lengths a tenth")
    args = parser.parse_args()
    args.side = args.side or ["ours", "ours:executor.weights=int8", "ours:attention=torch,executor.compiled=false",
                              "generate", "continuous"]  # fmt: skip
    unknown = [name for name in (side.partition(":")[0] for side in args.side) if name not in SIDES]
    unknown += [name for name in args.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # processes that are stopped would stay
    machine = roofline(args.threads)
    words = f"{args.threads} threads, products {machine['gflops']:.0f} GF/s, memory {machine['gbytes']:.1f} GB/s"
    print(words)
    with engines(args) as sides:
        found = measure(args, sides)
        about = {side.label: side.about for side in sides}
    bounds = {name: bound(name, 0.1 if args.quick else 1.0, machine) for name in args.workloads if name != "W4"}
    for line in table(found, bounds):
        print(line)
    if args.page:
        args.page.write_text(page(found, bounds, words))
    if args.json:
        lean = {
            name: {label: [{k: v for k, v in one.items() if k != "said"} for one in runs] for label, runs in of.items()}
            for name, of in found.items()
        }
        args.json.write_text(json.dumps({"machine": machine, "bounds": bounds, "about": about, "runs": lean}, indent=1))


if __name__ == "__main__":
    main()
