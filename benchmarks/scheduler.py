"""What scheduling costs beside the model: ours (``unified`` over ``paged``), and vLLM's where it can be imported.

    python benchmarks/scheduler.py [--rounds 15] [--only decode|queue|admission|churn ...] [--quick]

Both plan and commit the same steps with a model that costs no time; its output is built outside the timed parts. They
take turns within each round, so that a drift of the machine hits both; printed are medians over rounds, and the median
of the ratios within rounds (above 1: vLLM needs more). Rounds alternate between wall time and the thread's CPU time.
Pages of 16 tokens, prefix caching on, statistics off. Before each round garbage is collected and what is left is
frozen; the collector then runs as by default, on both sides.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import _vllm_peer
from _sides import CPU, PAGE_SIZE, WALL, Ours, Side, Sizes, Stopwatch

Work = Callable[[Side, Stopwatch], int]
"""One turn of a side; returns the number of steps (or admissions) that it took."""

COLUMNS = "{:<38}{:<6}{:>9}{:>9}{:>9}{:>9}{:>12}   {}"
HEAD = COLUMNS.format("scenario", "side", "plan", "commit", "both", "cpu", "ns/running", "vllm/ours: wall, cpu")


@dataclass(slots=True)
class Figures:
    """µs a step of one side, a value for each round."""

    plan: list[float]
    commit: list[float]
    wall: list[float]
    cpu: list[float]


def measure(sides: Sequence[Side], work: Work, rounds: int) -> list[Figures]:
    """The sides take turns, and the first of a round goes last in the next."""
    figures = [Figures([], [], [], []) for _ in sides]
    watches = {clock: Stopwatch(clock) for clock in (WALL, CPU)}
    order = range(len(sides))
    for number, clock in itertools.product(range(rounds), (WALL, CPU)):
        gc.collect()
        gc.freeze()
        watch = watches[clock]
        for index in reversed(order) if number % 2 else order:
            watch.reset()
            steps = work(sides[index], watch) * 1e3
            found = figures[index]
            if clock is WALL:
                found.plan.append(watch.plan / steps)
                found.commit.append(watch.commit / steps)
                found.wall.append((watch.plan + watch.commit) / steps)
            else:
                found.cpu.append((watch.plan + watch.commit) / steps)
    gc.unfreeze()
    return figures


def show(scenario: str, sides: Sequence[Side], figures: Sequence[Figures], running: int = 0) -> None:
    """A row for each side; with vLLM the ratio. ``running`` divides the cost, if it is that of so many requests."""
    for side, found in zip(sides, figures, strict=True):
        plan, commit, both, cpu = map(statistics.median, (found.plan, found.commit, found.wall, found.cpu))
        each = f"{both * 1e3 / running:.0f}" if running else ""
        times = f"{ratio(found.wall, figures[0].wall):.2f}, {ratio(found.cpu, figures[0].cpu):.2f}"
        cells = [scenario, side.name, *(f"{value:.1f}" for value in (plan, commit, both, cpu)), each]
        print(COLUMNS.format(*cells, times if side is not sides[0] else "").rstrip(), flush=True)


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Median of the ratios within rounds."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


class Bench:
    """The scenarios.

    Args:
        kinds: the sides to build, ours first.
        quick: small sizes that prove only that it runs.
        rounds: turns of each side and clock.
    """

    def __init__(self, kinds: Sequence[type[Side]], *, quick: bool, rounds: int) -> None:
        self._kinds = kinds
        self._quick = quick
        self._rounds = rounds
        self._draw = random.Random(0)

    def decode(self) -> None:
        """Steady decode: every running request owes one token; each step a sixteenth of them opens a page."""
        for overlap in (False, True):
            for running in (4,) if self._quick else (32, 128, 256, 1024):
                sides = self._steady(running, overlap=overlap)
                label = f"decode, {'overlap' if overlap else 'sync'}, {running} running"
                show(label, sides, measure(sides, self._decode_steps, self._rounds), running)
                _close(sides)

    def queue(self) -> None:
        """As decode, with a queue behind a full set of running requests: it should add nothing."""
        running = 4 if self._quick else 256
        lengths = (0, 20) if self._quick else (0, 1000, 10_000)
        for overlap in (False, True):
            sides = [self._steady(running, overlap=overlap, waiting=length) for length in lengths]
            figures = measure([side for group in sides for side in group], self._decode_steps, self._rounds)
            size = len(self._kinds)
            for number, (length, group) in enumerate(zip(lengths, sides, strict=True)):
                found = figures[number * size : (number + 1) * size]
                show(f"queue of {length}, {'overlap' if overlap else 'sync'}, {running} running", group, found, running)
                if length:
                    _show_added(length, group, found, figures[:size])
                _close(group)

    def admission(self) -> None:
        """A prompt comes and is planned: construction, hashing, look-up, pages. Alone in the engine."""
        length = 64 if self._quick else 2048
        count = 2 if self._quick else 20
        prompts = {"no hit": lambda: self._prompt(length), "full hit": lambda known=self._prompt(length): known}
        for label, prompt in prompts.items():
            sides = [kind(Sizes(running=8, pages=4000, budget=length)) for kind in self._kinds]

            def turn(side: Side, watch: Stopwatch, prompt: Callable[[], list[int]] = prompt) -> int:
                for _ in range(count):
                    side.admit(prompt(), watch)
                return count

            for side in sides:
                turn(side, Stopwatch(WALL))
            show(f"admission of {length} tokens, {label}", sides, measure(sides, turn, self._rounds))
            _close(sides)

    def churn(self) -> None:
        """A pool too small for those that run: requests lose their pages and start again; ended ones are replaced."""
        running, length, pages = (4, 32, 14) if self._quick else (64, 256, 64 * 19)
        for overlap in (False, True):
            sides = [kind(Sizes(running=running, pages=pages, overlap=overlap)) for kind in self._kinds]
            streams = {side: self._stream(length) for side in sides}

            def turn(side: Side, watch: Stopwatch, streams: dict[Side, Iterator[list[int]]] = streams) -> int:
                steps = 20 if self._quick else 100
                for _ in range(steps):
                    while side.running + side.waiting < running + 2:
                        side.add(next(streams[side]), length)
                    side.step(watch)
                return steps

            for side in sides:
                for _ in range(2 if self._quick else 6):
                    turn(side, Stopwatch(WALL))
            label = f"preemption, {'overlap' if overlap else 'sync'}, {running} running"
            before = [side.preemptions for side in sides]
            show(label, sides, measure(sides, turn, self._rounds), running)
            lost = [side.preemptions - start for side, start in zip(sides, before, strict=True)]
            print(
                f"  preemptions in these rounds: {', '.join(f'{s.name} {n}' for s, n in zip(sides, lost, strict=True))}"
            )
            _close(sides)

    # ---- inside

    def _steady(self, running: int, *, overlap: bool, waiting: int = 0) -> list[Side]:
        """Sides in steady decode, their page boundaries spread over the steps."""
        pages = running * 4096 // PAGE_SIZE
        sizes = Sizes(running=running, pages=pages, budget=max(2048, 2 * running), overlap=overlap)
        prompts = [self._prompt(32 + number % PAGE_SIZE) for number in range(running + waiting)]
        sides = [kind(sizes) for kind in self._kinds]
        watch = Stopwatch(WALL)
        for side in sides:
            for prompt in prompts:
                side.add(prompt, 90_000)
            while side.running < running or not side.decoding:
                side.step(watch)
            for _ in range(PAGE_SIZE):
                side.step(watch)
        return sides

    def _decode_steps(self, side: Side, watch: Stopwatch) -> int:
        steps = PAGE_SIZE if self._quick else 3 * PAGE_SIZE
        for _ in range(steps):
            side.step(watch)
        return steps

    def _prompt(self, length: int) -> list[int]:
        return [self._draw.randrange(1, 30_000) for _ in range(length)]

    def _stream(self, length: int) -> Iterator[list[int]]:
        """The same prompts for each side, shorter and longer ones."""
        draw = random.Random(1)
        while True:
            yield [draw.randrange(1, 30_000) for _ in range(draw.randrange(length // 2, length))]


def _show_added(length: int, sides: Sequence[Side], found: Sequence[Figures], empty: Sequence[Figures]) -> None:
    """The difference to the same scenario without a queue, as the median of those within rounds."""
    for side, queue, none in zip(sides, found, empty, strict=True):
        wall, cpu = (
            statistics.median(a - b for a, b in zip(x, y, strict=True))
            for x, y in ((queue.wall, none.wall), (queue.cpu, none.cpu))
        )
        print(f"  a queue of {length} adds, {side.name}: {wall:+.1f} µs a step wall, {cpu:+.1f} cpu")


def _close(sides: Sequence[Side]) -> None:
    for side in sides:
        side.close()


def _kinds() -> list[type[Side]]:
    version = _vllm_peer.installed()
    if version is None:
        print("vLLM cannot be imported here: ours alone")
        return [Ours]
    from _vllm_side import Vllm

    print(f"vLLM {version} beside ours")
    return [Ours, Vllm]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=("decode", "queue", "admission", "churn"))
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: to see that it runs")
    arguments = parser.parse_args()
    bench = Bench(_kinds(), quick=arguments.quick, rounds=1 if arguments.quick else arguments.rounds)
    print(f"µs a step (admission: a prompt), medians\n{HEAD}")
    for scenario in arguments.only or ("decode", "queue", "admission", "churn"):
        getattr(bench, scenario)()


if __name__ == "__main__":
    main()
