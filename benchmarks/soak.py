"""Many streams for long, half of them cut at random moments: what grows, what stays, and whether the books are right.

    python benchmarks/soak.py [--seconds 600] [--streams 200] [--tokens 64] [--seed 0] [--json FILE] [-- SERVE FLAGS …]

Starts ``engine serve`` (by default with the simulated model; ``-- --executor torch`` takes the default one), keeps so
many requests open. Every second one asks for far more than it stays for: its client leaves before the answer begins or
in the middle of it. At the end all is compared that has two sides: what clients saw and what the server's metrics say.
Printed is also the slope of the memory of both processes after the first third, by least squares.

Exit code 1 where the books differ, a page is still in use, or memory grows by more than ``--max-slope``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

LONG = 8000  # tokens; nobody who is cut stays for so many
SIM = ["--executor", "sim", "--executor.step-ms", "4"]
PATIENCE = 60.0

Samples = list[tuple[float, tuple[float, ...]]]
"""(second, MiB of each process)."""


class Server:
    """``engine serve`` in a process of its own, on a free port."""

    def __init__(self, flags: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from engine.cli import main; main()", "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.pids, self.address = [self.process.pid], ("", 0)
        for line in self.process.stdout:
            if core := re.match(r"core +process (\d+)", line):
                self.pids.append(int(core[1]))
            if found := re.match(r"listening on http://([^:]+):(\d+)", line):
                self.address = found[1], int(found[2])
                return
        raise SystemExit(f"the server did not start (exit code {self.process.wait()})")

    def metrics(self) -> dict[str, float]:
        """All samples by name and labels."""
        with urllib.request.urlopen("http://{}:{}/metrics".format(*self.address), timeout=PATIENCE) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def memory(self) -> tuple[float, ...]:
        """MiB that each of its processes holds: the server, and the engine's where that is another one."""
        return tuple(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20 for pid in self.pids)

    def stop(self) -> int:
        """Its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class Load:
    """Clients that come again and again. ``seen`` counts what became of their requests."""

    def __init__(self, address: tuple[str, int], tokens: int, seed: int) -> None:
        self._address, self._tokens, self._random = address, tokens, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.stopping = False

    async def client(self, number: int) -> None:
        """One after the other; every second one is cut."""
        while not self.stopping:
            number += 1
            await (self.cut() if number % 2 else self.whole())

    async def whole(self) -> None:
        """A stream read to its end."""
        reader, writer = await self._ask(self._random.randint(1, self._tokens))
        try:
            text = (await reader.read()).decode()
        finally:
            writer.close()
        good = text.startswith("HTTP/1.1 200") and "data: [DONE]" in text
        self.seen["completed" if good else "failed"] += 1

    async def cut(self) -> None:
        """A stream that is left: at once, or after some time of it."""
        reader, writer = await self._ask(LONG)
        try:
            if self._random.random() < 0.8:
                await asyncio.wait_for(reader.readline(), PATIENCE)
                async with asyncio.timeout(self._random.random()):
                    while await reader.read(4096):
                        pass
                self.seen["failed"] += 1  # it has ended before its time
                return
        except TimeoutError:
            pass
        finally:
            writer.close()
        self.seen["cut"] += 1

    async def _ask(self, tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        prompt = [self._random.randrange(1000) for _ in range(self._random.randint(1, 64))]
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}).encode()
        reader, writer = await asyncio.open_connection(*self._address)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer


async def drive(server: Server, options: argparse.Namespace) -> tuple[Counter[str], Samples]:
    """Keep the clients coming for as long as asked. Returns what they saw, and the memory of the server."""
    load = Load(server.address, options.tokens, options.seed)
    clients = [asyncio.create_task(load.client(number)) for number in range(options.streams)]
    began = time.monotonic()
    samples: Samples = []
    while (passed := time.monotonic() - began) < options.seconds:
        samples.append((passed, server.memory()))
        await asyncio.sleep(min(1.0, options.seconds / 20))
    load.stopping = True
    await asyncio.gather(*clients)
    return load.seen, samples


def slope(samples: Samples, process: int | None = None) -> float:
    """MiB a minute, by least squares, of what comes after the first third: of one process, or of all."""
    late = [(x, sum(each) if process is None else each[process]) for x, each in samples[len(samples) // 3 :]]
    mean_x = sum(x for x, _ in late) / len(late)
    mean_y = sum(y for _, y in late) / len(late)
    spread = sum((x - mean_x) ** 2 for x, _ in late)
    return 60 * sum((x - mean_x) * (y - mean_y) for x, y in late) / spread if spread else 0.0


def idle(server: Server) -> dict[str, float]:
    """The metrics once nothing runs and nothing waits."""
    deadline = time.monotonic() + PATIENCE
    while True:
        now = server.metrics()
        if not (now["engine_requests_running"] or now["engine_requests_waiting"]) or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


def faults(seen: Counter[str], now: dict[str, float]) -> list[str]:
    """Where the two sides differ."""
    ended = {name.split('"')[1]: value for name, value in now.items() if name.startswith("engine_requests_ended_total")}
    ours = 'engine_http_requests_total{path="/v1/completions"'
    answers = {name: value for name, value in now.items() if name.startswith(ours)}
    left = sum(value for name, value in answers.items() if 'status="499"' in name)
    pairs = {
        "failed requests, as clients saw them": (seen["failed"], 0),
        "complete answers and requests that ended by length": (seen["completed"], ended["length"]),
        "requests that were cut, and those counted as left (499)": (seen["cut"], left),
        "requests sent, and HTTP requests counted": (seen["cut"] + seen["completed"], sum(answers.values())),
        "accepted requests, and all ends": (now["engine_requests_accepted_total"], sum(ended.values())),
        "pages in use": (now["engine_kv_pages_pinned"], 0),
        "requests that run or wait": (now["engine_requests_running"] + now["engine_requests_waiting"], 0),
        "pages that are free or cached": (
            now["engine_kv_pages_free"] + now["engine_kv_pages_evictable"], now["engine_kv_pages"]
        ),
    }  # fmt: skip
    return [f"{words}: {one:g} and {other:g}" for words, (one, other) in pairs.items() if one != other]


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of those that stay to the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-slope", type=float, default=None, help="MiB a minute; more is a fault")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="flags of engine serve, after --")
    options = parser.parse_args()
    server = Server(["--max-waiting", str(4 * options.streams), *(options.flags or SIM)])
    try:
        seen, samples = asyncio.run(drive(server, options))
        now = idle(server)
    finally:
        code = server.stop()
    grows = slope(samples)
    result: dict[str, Any] = {
        "seconds": options.seconds, "streams": options.streams, "completed": seen["completed"], "cut": seen["cut"],
        "accepted": now["engine_requests_accepted_total"], "output_tokens": now["engine_output_tokens_total"],
        "mib_start": sum(samples[0][1]), "mib_end": sum(samples[-1][1]), "mib_per_minute": grows,
        "of_each_process": [round(slope(samples, number), 2) for number in range(len(samples[0][1]))],
        "pages_in_use": now["engine_kv_pages_pinned"], "exit_code": code, "faults": faults(seen, now),
    }  # fmt: skip
    if options.max_slope is not None and grows > options.max_slope:
        result["faults"].append(f"memory grows by {grows:.2f} MiB a minute")
    if code != 0:
        result["faults"].append(f"the server ended with exit code {code}")
    for key, value in result.items():
        print(f"{key:<16}{value:.2f}" if isinstance(value, float) else f"{key:<16}{value}")
    if options.json is not None:
        options.json.write_text(json.dumps({**result, "samples": samples}))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
