"""What the ``radix`` cache and scheduler cost beside the model: ours, and SGLang's where it can be imported.

    python benchmarks/radix.py [--rounds 15] [--only match|insert|evict|order|admission|decode|memory ...] [--quick]

Both sides have the same contents and take turns within each round; printed are medians over rounds in µs, and the
median of the ratios within rounds (below 1: ours needs less). Rounds alternate between wall time and the thread's CPU
time. Before each round garbage is collected and what is left is frozen; the collector then runs as by default.

* match: a key of 2,048 tokens that lies in the tree, on 2 or 16 nodes. SGLang's answer holds the slots; ours names the
  last node, and *with pages* gathers the page table too.
* insert: a key of 2,048 tokens, half of which is there; its slots are at hand.
* evict: the least recently used leaves; their slots return to the pool. As much is inserted again, untimed.
* order: one pass over the waiting queue, *first* over requests that were never looked up, and *again* as in every later
  step. Half of the prompts have half of their 2,048 tokens cached; of the others half share an uncached beginning.
* admission: of all that wait, a request. SGLang's is ``init_next_round_input`` and ``add_one_req``: look-up, budgets,
  pin. Ours is the scheduler's own loop over the queue: look-up, ledger, pin, and also the page table, the way out of
  the queue, and the row of the plan. Neither takes the pages of what is to be computed.
* decode: a step of the whole loop, plan and commit. SGLang's loop does not run without a model worker: beside ours
  stand figures that were recorded from its own loop on another day and machine (thread CPU time).
* memory: bytes a node as Python counts them. Ours lists numbers that the pool made at its start and that move between
  lists; of SGLang's slots the numbers are added, but not the tensor objects around them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType

import _sglang_peer
import _sides
from _radix_sides import Ours, RadixSide, Sglang, Tokens
from _sides import CPU, WALL, Sizes, Stopwatch

SCENARIOS = ("match", "insert", "evict", "order", "admission", "decode", "memory")
LENGTH = 2048
STRETCH = 32  # tokens a node of the trees
LEAVES = 20  # a branch
RECORDED_DECODE = {32: 700.0, 128: 2400.0, 256: 4500.0}
COLUMNS = "{:<52}{:<8}{:>10}{:>10}   {}"
HEAD = COLUMNS.format("scenario", "side", "wall", "cpu", "ours/sglang: wall, cpu")

Turn = Callable[[RadixSide, Stopwatch], int]
"""One turn of a side; returns the number of operations that it timed."""


class Loop(_sides.Ours):
    """The whole loop with both ``radix``."""

    plugins = MappingProxyType({"scheduler": "radix", "kvcache": "radix", "page_size": 1})


def measure(sides: Sequence[RadixSide], turn: Turn, rounds: int) -> list[dict[_sides.Clock, list[float]]]:
    """µs an operation, of each side and clock; the first of a round goes last in the next."""
    found: list[dict[_sides.Clock, list[float]]] = [{WALL: [], CPU: []} for _ in sides]
    watches = {clock: Stopwatch(clock) for clock in (WALL, CPU)}
    for number, clock in itertools.product(range(rounds), (WALL, CPU)):
        gc.collect()
        gc.freeze()
        watch = watches[clock]
        for index in reversed(range(len(sides))) if number % 2 else range(len(sides)):
            watch.reset()
            count = turn(sides[index], watch)
            found[index][clock].append(watch.plan / count / 1e3)
    gc.unfreeze()
    return found


def show(scenario: str, sides: Sequence[RadixSide], found: Sequence[dict[_sides.Clock, list[float]]]) -> None:
    """A row for each side; with SGLang the ratios."""
    for side, times in zip(sides, found, strict=True):
        wall, cpu = (f"{statistics.median(times[clock]):.1f}" for clock in (WALL, CPU))
        ratios = ""
        if side is not sides[0]:
            wall_ratio, cpu_ratio = (
                statistics.median(a / b for a, b in zip(found[0][clock], times[clock], strict=True))
                for clock in (WALL, CPU)
            )
            ratios = f"{wall_ratio:.3f}, {cpu_ratio:.3f}"
        print(COLUMNS.format(scenario, side.name, wall, cpu, ratios).rstrip(), flush=True)


def repeated(operation: str, *arguments: object, times: int) -> Turn:
    """A turn that calls a method so often, all timed together."""

    def turn(side: RadixSide, watch: Stopwatch) -> int:
        call, clock = getattr(side, operation), watch.clock
        given = [side.key(argument) if isinstance(argument, list) else argument for argument in arguments]
        start = clock()
        for _ in range(times):
            call(*given)
        watch.plan += clock() - start - watch.cost
        return times

    return turn


class Bench:
    """The scenarios.

    Args:
        kinds: the sides to build, ours first.
        quick: small sizes that prove only that it runs.
        rounds: turns of each side and clock.
    """

    def __init__(self, kinds: Sequence[type[RadixSide]], *, quick: bool, rounds: int) -> None:
        self._kinds = kinds
        self._quick = quick
        self._rounds = rounds
        self._draw = random.Random(0)
        self._sizes = (100,) if quick else (1000, 10_000)
        self._times = 2 if quick else 50

    def match(self) -> None:
        """Of a key that is there."""
        sizes = self._sizes if self._quick else (*self._sizes, 100_000)
        for page, nodes in itertools.product((1, 16), sizes):
            sides = self._filled(nodes, page)
            for stretches in (2, 16):
                key = self._document(sides, stretches)
                label = f"match, {stretches} on the path, {nodes} nodes, page {page}"
                self._run(label, sides, repeated("match", key, times=self._times))
                self._run(f"{label}, pages", sides, repeated("match_with_pages", key, times=self._times))

    def insert(self) -> None:
        """Of a key whose half is there."""
        for page, nodes in itertools.product((1, 16), self._sizes):
            sides = self._filled(nodes, page)
            half = self._document(sides, 2)[: LENGTH // 2]
            keys = [half + self._tokens(LENGTH // 2) for _ in range(self._times)]

            def turn(side: RadixSide, watch: Stopwatch, keys: list[list[int]] = keys) -> int:
                for key in [side.key(key) for key in keys]:
                    side.insert(key, watch)
                return len(keys)

            self._run(f"insert, {nodes} nodes, page {page}", sides, turn)

    def evict(self) -> None:
        """Of one leaf, and of 1,000 tokens."""
        for page, nodes, tokens in itertools.product((1, 16), self._sizes, (1, 1000)):
            sides = self._filled(nodes, page, room=4 * LENGTH)  # what is evicted goes to a pool that is nearly empty
            fresh = {side: self._paths(10**9, seed=2) for side in sides}
            room = {side: side.free for side in sides}

            def turn(
                side: RadixSide,
                watch: Stopwatch,
                fresh: dict[RadixSide, Iterator[list[int]]] = fresh,
                tokens: int = tokens,
                room: dict[RadixSide, int] = room,
            ) -> int:
                times = 2 if self._quick else 10
                for _ in range(times):
                    repeated("evict", tokens, times=1)(side, watch)
                    while side.free >= room[side] + 2 * STRETCH:
                        side.remember(side.key(next(fresh[side])))
                return times

            self._run(f"evict {tokens}, {nodes} nodes, page {page}", sides, turn)

    def order(self) -> None:
        """One pass over the queue."""
        nodes = self._sizes[-1]
        for policy, waiting in (("lpm", 64), ("lpm", 128), ("lpm", 129), ("dfs-weight", 128)):
            sides = self._filled(nodes, 1, policy)
            prompts = self._prompts(sides, waiting)
            label = f"{policy} of {waiting}{', falls back' if waiting == 129 else ''}"

            def first(side: RadixSide, watch: Stopwatch, prompts: list[list[int]] = prompts) -> int:
                side.enqueue(prompts)
                side.order(watch)
                return 1

            def again(side: RadixSide, watch: Stopwatch) -> int:
                for _ in range(3):
                    side.order(watch)
                return 3

            self._run(f"{label}, first", sides, first)
            self._run(f"{label}, again", sides, again)

    def admission(self) -> None:
        """A request, of 64."""
        for page in (1, 16):
            sides = self._filled(self._sizes[-1], page)
            prompts = self._prompts(sides, 4 if self._quick else 64)

            def turn(side: RadixSide, watch: Stopwatch, prompts: list[list[int]] = prompts) -> int:
                side.enqueue(prompts)
                count = side.admit(watch)
                assert count == len(prompts)
                return count

            self._run(f"admission, page {page}", sides, turn)

    def decode(self) -> None:
        """A step of the loop in steady decode, beside recorded figures."""
        for running in (4,) if self._quick else (32, 128, 256):
            side = Loop(Sizes(running=running, pages=running * 8192, budget=4096))
            for _ in range(running):
                side.add(self._tokens(32), 90_000)
            watch = Stopwatch(WALL)
            while side.running < running or not side.decoding:
                side.step(watch)
            times: dict[_sides.Clock, list[float]] = {WALL: [], CPU: []}
            for _, clock in itertools.product(range(self._rounds), (WALL, CPU)):
                gc.collect()
                gc.freeze()
                watch = Stopwatch(clock)
                for _ in range(48):
                    side.step(watch)
                times[clock].append((watch.plan + watch.commit) / 48e3)
            gc.unfreeze()
            side.close()
            wall, cpu = (statistics.median(times[clock]) for clock in (WALL, CPU))
            recorded = RECORDED_DECODE.get(running)
            label = f"decode, {running} running"
            print(COLUMNS.format(label, "ours", f"{wall:.1f}", f"{cpu:.1f}", "").rstrip())
            if recorded:
                ratio = f"     , {cpu / recorded:.3f} (recorded on another day)"
                print(COLUMNS.format(label, "sglang", "", f"{recorded:.1f}", ratio), flush=True)

    def memory(self) -> None:
        """Bytes a node."""
        nodes = 100 if self._quick else 100_000
        for page in (1, 16):
            for kind in self._kinds:
                size, count = kind.tree_of(lambda: self._paths(nodes), page)
                print(f"memory, page {page}, {count} nodes of {STRETCH} tokens, {kind.name}: {size:.0f} bytes a node")

    # ---- inside

    def _run(self, label: str, sides: Sequence[RadixSide], turn: Turn) -> None:
        for side in sides:
            turn(side, Stopwatch(WALL))
        show(label, sides, measure(sides, turn, self._rounds))

    def _filled(self, nodes: int, page: int, policy: str = "fcfs", room: int = 160 * LENGTH) -> list[RadixSide]:
        """Sides with a tree of so many nodes, and so much room in the pool, in tokens."""
        tokens = nodes * STRETCH + room
        sides = [kind(page, tokens // page, policy) for kind in self._kinds]
        for side in sides:
            side.fill(self._paths(nodes))
        return sides

    def _paths(self, nodes: int, seed: int = 1) -> Iterator[list[int]]:
        """Keys that make about so many nodes: branches, each with its leaves."""
        draw = random.Random(seed)
        made = 0
        while made < nodes:
            branch = draw.choices(range(1, 30_000), k=STRETCH)
            for _ in range(LEAVES):
                yield branch + draw.choices(range(1, 30_000), k=STRETCH)
            made += LEAVES + 1

    def _document(self, sides: Sequence[RadixSide], stretches: int) -> list[int]:
        """A key that is cached on so many nodes."""
        tokens = self._tokens(LENGTH)
        step = LENGTH // stretches
        for side, end in itertools.product(sides, range(step, LENGTH + 1, step)):
            side.remember(side.key(tokens[:end]))
        return tokens

    def _prompts(self, sides: Sequence[RadixSide], count: int) -> list[list[int]]:
        half = LENGTH // 2
        cached = [self._document(sides, 4)[:half] for _ in range(8)]
        shared = self._tokens(half)
        beginnings: list[Tokens] = [
            cached[number % 8] if number % 2 else shared if number % 4 else () for number in range(count)
        ]
        return [[*beginning, *self._tokens(LENGTH - len(beginning))] for beginning in beginnings]

    def _tokens(self, length: int) -> list[int]:
        return self._draw.choices(range(1, 30_000), k=length)


def _kinds() -> list[type[RadixSide]]:
    version = _sglang_peer.installed()
    if version is None:
        print("SGLang cannot be imported here: ours alone")
        return [Ours]
    print(f"SGLang {version} beside ours (written against {_sglang_peer.VERSION})")
    _sglang_peer.classes()
    return [Ours, Sglang]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: to see that it runs")
    arguments = parser.parse_args()
    bench = Bench(_kinds(), quick=arguments.quick, rounds=1 if arguments.quick else arguments.rounds)
    print(f"µs an operation, medians\n{HEAD}")
    for scenario in arguments.only or SCENARIOS:
        getattr(bench, scenario)()


if __name__ == "__main__":
    main()
