"""Arrivals that several experiments use, beside those that ``engine.lab.workload`` spells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random

from _kit import Make

from engine.lab import Arrival, Piece, Workload, workload
from engine.lab.arrivals import seed_of
from engine.lab.lengths import distribution, whole


def spelled(text: str, requests: int) -> Make:
    """A workload as ``engine simulate`` writes it, of so many requests."""
    return lambda seed, scale: workload(f"{text},requests={least(requests, scale)}", seed)


def least(requests: int, scale: float) -> int:
    """Part of the requests, and some at least."""
    return max(20, round(requests * scale))


def mixed(*parts: tuple[str, str, float], requests: int) -> Make:
    """Several kinds at once, each a tenant: (name, its lengths, its rate). Each has its part of the requests, so that
    all last equally long."""
    rate = sum(part[2] for part in parts)

    def make(seed: int, scale: float) -> Workload:
        found: list[Arrival] = []
        for name, lengths, own in parts:
            count = max(3, round(requests * scale * own / rate))
            made = workload(f"poisson:rate={own},requests={count},{lengths}", seed_of(seed, name))
            found += [replace(one, id=f"{name}-{one.id}", tenant=name) for one in made]
        return Workload(found)

    return make


def families(*, rate: float, requests: int, groups: int, shared: int, own: str, output: str, skew: float = 1.0) -> Make:
    """Groups of requests that begin alike with ``shared`` tokens; each group is a tenant. The n-th is asked for as
    often as 1 / n ** skew."""

    def make(seed: int, scale: float) -> Workload:
        clock, rng = Random(seed_of(seed, "times")), Random(seed_of(seed, "lengths"))
        prompt, answer = distribution(own), distribution(output)
        weights = list(accumulate(1 / (number + 1) ** skew for number in range(groups)))
        now, found = 0.0, []
        for number in range(least(requests, scale)):
            now += clock.expovariate(rate)
            group = rng.choices(range(groups), cum_weights=weights)[0]
            pieces = (Piece(seed_of(seed, "group", group), shared), Piece(seed_of(seed, number), whole(prompt, rng)))
            found.append(Arrival(f"r{number}", now, pieces, whole(answer, rng), tenant=f"g{group:03d}"))
        return Workload(found)

    return make


def bursts_of_copies(*, rate: float, requests: int, copies: int, prompt: str, own: int, output: str) -> Make:
    """Prompts that come ``copies`` at a time, at the same moment, and differ in their last ``own`` tokens at most;
    ``rate`` is of requests, so that fewer bursts come the larger they are."""

    def make(seed: int, scale: float) -> Workload:
        clock, rng = Random(seed_of(seed, "times")), Random(seed_of(seed, "lengths"))
        length, answer = distribution(prompt), distribution(output)
        now, found = 0.0, []
        for burst in range(max(2, least(requests, scale) // copies)):
            now += clock.expovariate(rate / copies)
            common = Piece(seed_of(seed, "burst", burst), whole(length, rng))
            for copy in range(copies):
                rest: Sequence[Piece] = (Piece(seed_of(seed, burst, copy), own),) if own else ()
                found.append(Arrival(f"b{burst}.{copy}", now, (common, *rest), whole(answer, rng)))
        return Workload(found)

    return make
