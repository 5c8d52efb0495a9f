"""How fast pages go from one engine's KV memory to another's, by every connector that hands them over.

    python benchmarks/transports.py [--rounds 5] [--only local] [--shape 262144x256 …]

Two processes on one host, nothing else between them than what serving has: leases, look-up, staging area, checksum,
renewal, release. Pages lie scattered on both sides and are one row of so many bytes each. The ways take turns within a
round, so that a noisy machine is noisy for all; printed are the median and the best of the rounds in GB/s, and, against
the better of NIXL and Mooncake over TCP, what is asked of ``local``: to be at least as fast on 16K x 1024 and 256K x
256. Ways whose library is not installed are left out, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.core import ConfigError, Connector, ModelInfo
from engine.core.memory import KVLayout
from engine.core.plan import Transfer, TransferEvent
from engine.core.registry import make
from engine.plugins.executors._memfd import MARK, shared_file

STAGED = {"staging": "128MiB"}
LO = {"devices": "lo", **STAGED}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "local shared": ("local", {}),
    "local streamed": ("local", {"shared": False}),
    "  no checksum": ("local", {"shared": False, "checksum": False}),
    "nixl tcp": ("nixl", {**LO, "tls": "tcp,self"}),
    "nixl tcp push": ("nixl", {**LO, "tls": "tcp,self", "style": "push"}),
    "nixl tcp, shm": ("nixl", {**LO, "tls": "tcp,shm,self"}),
    "mooncake tcp": ("mooncake", STAGED),
}
OVER_TCP = ("nixl tcp", "nixl tcp push", "mooncake tcp")
SHAPES = ("16384x1024", "262144x256", "16384x1", "4194304x16")
BOUND = SHAPES[:2]
COMMON = {"lease_seconds": 60, "patience": 60, "saving_share": 1}


class Side:
    """One connector over memory of its own, ``pages`` rows of ``size`` bytes."""

    def __init__(self, way: str, size: int, pages: int, fill: int | None) -> None:
        name, options = WAYS[way]
        made = shared_file(size * pages + MARK)
        memory = made[1] if made is not None else bytearray(size * pages + MARK)
        self.region = np.frombuffer(memory, np.uint8, offset=MARK).reshape(pages, size)
        if fill is None:
            self.region[:] = np.random.default_rng(1).integers(0, 256, (pages, size), np.uint8)
        else:
            self.region[:] = fill
        self.store: Connector = make("connector", name, {**COMMON, **options})
        model = ModelInfo(name="m", vocab_size=9, max_model_len=9, fingerprint="f")
        self.store.start(SimpleNamespace(limits=SimpleNamespace(page_size=16), model=model))  # type: ignore[arg-type]
        self.store.register(KVLayout((self.region,), "a" * 32, made[0] if made is not None else None))

    def end_of(self, wish: Transfer, pause: float = 0.0001) -> TransferEvent:
        """Ask, and wait for the end, looking every ``pause`` seconds."""
        events = list(self.store.transfer_kv([wish]))
        while not (mine := [event for event in events if event.transfer_id == wish.id]):
            time.sleep(pause)
            events = list(self.store.transfer_kv([]))
        return mine[0]


def keys(count: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(32, "big") for number in range(count))


def scattered(count: int, seed: int) -> tuple[int, ...]:
    """So many of twice as many pages."""
    return tuple(np.random.default_rng(seed).permutation(2 * count)[:count].tolist())


def sender(way: str, size: int, count: int) -> None:
    """The other process: lease the pages, again whenever they are let go."""
    side, number = Side(way, size, 2 * count, None), 0
    pages, names = scattered(count, 2), keys(count)
    print("at", json.dumps(side.store.describe()["address"]), flush=True)
    while True:
        number += 1
        side.end_of(Transfer(f"p{number}", "push", f"r{number}", pages, names, hints={"kv_role": "prefill"}), 0.005)


class Pair:
    """A sender's process and a receiver here."""

    def __init__(self, way: str, size: int, count: int) -> None:
        command = [sys.executable, __file__, "--sender", way, "--shape", f"{size}x{count}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith("at "):
            if not line:
                raise ConfigError("the other process did not start")
        self.address = json.loads(line.removeprefix("at "))
        self.here = Side(way, size, 2 * count, 0)
        self.count, self.size, self.number = count, size, 0

    def once(self) -> float:
        """Seconds from the wish to its end. Raises ``AssertionError`` where the bytes are others."""
        self.number += 1
        names, pages, hints = keys(self.count), scattered(self.count, 3), {"kv_from": self.address}
        name, found = f"{self.number}", 0
        while found < 16 * self.count:  # they are being leased again
            found = self.here.end_of(Transfer(f"f{name}", "probe", name, keys=names, hints=hints)).tokens
        start = time.perf_counter()
        event = self.here.end_of(Transfer(f"g{name}", "pull", name, pages, names, hints=hints))
        seconds = time.perf_counter() - start
        assert event.kind == "done", event.reason
        return seconds

    def check(self, content: np.ndarray) -> None:
        """What came is what was there."""
        here, there = list(scattered(self.count, 3)), list(scattered(self.count, 2))
        assert (self.here.region[here] == content[there]).all()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.here.store.close()


def compare(shape: str, ways: list[str], rounds: int) -> dict[str, tuple[float, float]]:
    """(median, best) GB/s of each way."""
    size, count = map(int, shape.split("x"))
    pairs: dict[str, Pair] = {}
    try:
        for way in ways:
            pairs[way] = Pair(way, size, count)
        content = np.random.default_rng(1).integers(0, 256, (2 * count, size), np.uint8)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):  # the first is a warm-up
            for way, pair in pairs.items():
                took = pair.once()
                if number:
                    seconds[way].append(took)
                else:
                    pair.check(content)
        total = size * count / 1e9
        return {way: (total / statistics.median(all_), total / min(all_)) for way, all_ in seconds.items()}
    finally:
        for pair in pairs.values():
            pair.close()


def usable(ways: list[str]) -> list[str]:
    """Those whose library is here; the others are said."""
    found = []
    for way in ways:
        name, options = WAYS[way]
        try:
            make("connector", name, options).close()
            found.append(way)
        except ConfigError as error:
            print(f"left out: {way}: {error}")
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), metavar="BYTESxPAGES")
    parser.add_argument("--only", default="", help="ways whose name has this in it")
    parser.add_argument("--sender", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sender:
        sender(arguments.sender, *map(int, arguments.shape[0].split("x")))
        return
    ways = usable([way for way in WAYS if arguments.only in way])
    print(f"GB/s, median and best of {arguments.rounds} rounds, {os.cpu_count()} processors")
    for shape in arguments.shape:
        size, count = shape.split("x")
        print(f"\n{int(size) // 1024} KiB x {count}")
        speeds = compare(shape, ways, arguments.rounds)
        for way, (median, best) in speeds.items():
            print(f"  {way:<16}{median:>8.2f}{best:>8.2f}")
        rivals = [speeds[way][0] for way in OVER_TCP if way in speeds]
        if shape in BOUND and rivals and "local shared" in speeds:
            for way in ("local shared", "local streamed"):
                print(f"  {way} / the better over TCP: {speeds[way][0] / max(rivals):.1f}")


if __name__ == "__main__":
    main()
