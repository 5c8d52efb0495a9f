"""``engine bench`` beside vLLM's load client: the same prompts at the same times to the same server, in turns.

    python benchmarks/bench_agrees.py --vllm-python PATH [--rounds 5] [--rate 6] [--requests 120] [--json FILE]
        [--prompt 64-256] [--output 16-48] [-- --executor sim --executor.step-ms 20 --executor.us-per-token 20]

``PATH`` is the Python of an environment in which ``vllm.benchmarks.serve`` can be imported. What follows ``--`` are
flags of the ``engine serve`` that is loaded (default: the simulated executor as above, so that the load clients are
what is compared; ``-- --executor torch`` is the default model). Each client has its turn in each round, the one that
begins changing; every turn has other tokens, so that nothing is cached. TTFT is told from when a request was sent, as
vLLM's client does, and beside it from when it was due, as ``engine bench`` does.

Wanted: medians over the rounds of means and medians within 5 %. Exit status 1 where one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _serve_http import Server

from engine.lab import Results, Workload, drive, workload
from engine.lab.arrivals import tokens_of
from engine.lab.endpoint import Endpoint, EndpointTarget
from engine.lab.inside import SPECIAL
from engine.lab.jobs import reseeded
from engine.lab.measured import spread

WANTED = 0.05
SIM = ("--executor", "sim", "--executor.step-ms", "20", "--executor.us-per-token", "20")
FIGURES = {f"{name} {how}": (name, how) for name in ("ttft", "tpot", "itl", "e2e") for how in ("mean", "p50", "p99")}
ROW = "{:<16}{:>12}{:>12}{:>10}   {}"


def ours(endpoint: Endpoint, made: Workload) -> dict[str, float]:
    """One turn of our client."""

    async def turn() -> Any:
        async with EndpointTarget(endpoint) as target:
            return await drive(target, made)

    driven = asyncio.run(turn())
    bad = [one for one in driven.requests if not one.answered]
    if bad:
        raise SystemExit(f"{len(bad)} requests were not answered: {bad[0].finish}: {bad[0].detail}")
    results = Results(workload="", requests=driven.requests, gaps=driven.gaps, seconds=driven.seconds, engines=(),
                      wall=driven.wall, cpu=driven.cpu, client=driven.client)  # fmt: skip
    summary = results.summary()
    found = {figure: summary[name][how] for figure, (name, how) in FIGURES.items()}
    for name in ("ttft", "e2e"):  # from when it was sent
        values = spread(getattr(one, name) - one.late for one in driven.requests)
        found |= {f"{name} {how}": values[how] for how in ("mean", "p50", "p99")}
    return {**found, "tokens/s": summary["output_tokens_per_second"], "requests": len(driven.requests),
            "ttft due p50": summary["ttft"]["p50"], "late p99": summary["late"]["p99"],
            "cpu share": driven.client.cpu_share}  # fmt: skip


class Theirs:
    """vLLM's client, in a process that stays."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).with_name("_bench_peer.py")
        self._process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._say()

    def turn(self, endpoint: Endpoint, made: Workload) -> dict[str, float]:
        """One turn."""
        first = made.arrivals[0].at  # its clock begins with the first request, as ours
        requests = [[one.at - first, tokens_of(one.prompt, endpoint.vocab, SPECIAL), one.output] for one in made]
        assert self._process.stdin is not None
        job = {"url": endpoint.base, "model": endpoint.model, "requests": requests}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        said = self._say()
        if said["completed"] != len(made):
            raise SystemExit(f"vLLM's client has answers to {said['completed']} of {len(made)} requests")
        names = {"mean": "mean", "p50": "median", "p99": "p99"}
        theirs = {"e2e": "e2el"}
        found = {figure: said[f"{names[how]}_{theirs.get(name, name)}_ms"] / 1e3
                 for figure, (name, how) in FIGURES.items()}  # fmt: skip
        return {**found, "tokens/s": said["output_throughput"], "requests": said["completed"]}

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _say(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            raise SystemExit(f"vLLM's client has ended: {self._process.stderr.read()[-2000:]}")
        return json.loads(line)


def table(our: Sequence[dict[str, float]], their: Sequence[dict[str, float]]) -> tuple[list[dict[str, Any]], bool]:
    """Print it; returns its rows, and whether all is as wanted."""
    print(ROW.format("median of turns", "ours", "vLLM's", "ours +", "wanted"))
    rows, good = [], True
    for figure in (*FIGURES, "tokens/s"):
        a, b = (statistics.median(one[figure] for one in turns) for turns in (our, their))
        off, judged = a / b - 1, not figure.endswith("p99")
        kept = abs(off) <= WANTED or not judged
        good &= kept
        words = f"within {WANTED:.0%}" + ("" if kept else ": NO") if judged else ""
        print(ROW.format(figure, f"{a:.4f}", f"{b:.4f}", f"{off:+.1%}", words))
        rows.append({"figure": figure, "ours": a, "theirs": b, "off": off, "judged": judged, "kept": kept})
    for name in ("ttft due p50", "late p99", "cpu share"):
        print(ROW.format(name, f"{statistics.median(one[name] for one in our):.4f}", "", "", ""))
    return rows, good


def compare(args: argparse.Namespace, url: str, peer: Theirs) -> tuple[list[dict[str, Any]], bool]:
    """All rounds."""
    endpoint = Endpoint.find(url)
    text = f"poisson:rate={args.rate},requests={args.requests},prompt={args.prompt},output={args.output}"
    turns: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for number in range(-1, args.rounds):  # the first round is a warm-up of both
        made = workload(text, max(number, 0))
        sides = ["ours", "theirs"] if number % 2 else ["theirs", "ours"]
        for side in sides:
            other = reseeded(made, (number, side))
            found = ours(endpoint, other) if side == "ours" else peer.turn(endpoint, other)
            if number >= 0:
                turns[side].append(found)
        if number >= 0:
            last = {side: [turns[side][-1][figure] * 1e3 for figure in ("ttft p50", "itl p50")] for side in turns}
            said = "   ".join(f"{side} ttft {ttft:.2f} itl {itl:.2f} ms" for side, (ttft, itl) in last.items())
            print(f"round {number + 1}: {said}", flush=True)
    return table(turns["ours"], turns["theirs"])


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=6.0)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--prompt", default="64-256")
    parser.add_argument("--output", default="16-48")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="of engine serve, after --")
    args = parser.parse_args()
    command = [sys.executable, "-c", "from engine.cli import main; main()", "serve", "--port", "{port}"]
    server = Server([*command, *(args.flags or SIM)])
    try:
        peer = Theirs(args.vllm_python)
        try:
            rows, good = compare(args, server.url, peer)
        finally:
            peer.close()
    finally:
        server.close()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
