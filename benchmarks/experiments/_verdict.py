"""Who wins: by goodput, pair by pair of runs with the same arrivals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

MATTERS = 0.01  # a difference of means below this part is none
SAME = 0.005  # at one seed

Row = Mapping[str, Any]
"""Of a data file: ``workload``, ``x``, and ``sides``: name -> figure -> its value at each seed."""


def mean(values: Sequence[float]) -> float:
    """Their mean."""
    return sum(values) / len(values)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one case.

    Attributes:
        leaders: sides that nobody clearly beats; with one alone it is the winner.
        best: the side with the highest mean.
        next, last: of the sides that are beaten, the best and the worst; empty: there are none.
        over_next, over_last: by how much the best is better than these, of the means; ``None``: they have nothing.
    """

    workload: str
    x: float
    leaders: tuple[str, ...]
    best: str
    next: str = ""
    last: str = ""
    over_next: float | None = None
    over_last: float | None = None

    @property
    def winner(self) -> str | None:
        """The one leader; ``None``: a tie."""
        return self.leaders[0] if len(self.leaders) == 1 else None


def verdict(row: Row) -> Verdict:
    """Who wins a case."""
    goodput = {name: found["goodput"] for name, found in row["sides"].items()}
    best = max(goodput, key=lambda name: mean(goodput[name]))
    leaders = tuple(name for name in goodput if name == best or not beats(goodput[best], goodput[name]))
    rest = sorted((name for name in goodput if name not in leaders), key=lambda name: -mean(goodput[name]))
    if not rest:
        return Verdict(row["workload"], row["x"], leaders, best)
    own = mean(goodput[best])
    gains = [own / other - 1 if (other := mean(goodput[name])) > 0 else None for name in (rest[0], rest[-1])]
    return Verdict(row["workload"], row["x"], leaders, best, rest[0], rest[-1], *gains)


def beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Better by enough in the mean, and at no seed worse by more than is none."""
    never_worse = all(a >= (1 - SAME) * b for a, b in zip(one, other, strict=True))
    return never_worse and mean(one) > (1 + MATTERS) * mean(other)


def verdicts(rows: Sequence[Row]) -> dict[str, list[Verdict]]:
    """By workload, in order of x."""
    found: dict[str, list[Verdict]] = {}
    for row in rows:
        found.setdefault(row["workload"], []).append(verdict(row))
    return {name: sorted(own, key=lambda one: one.x) for name, own in found.items()}


def flips(rows: Sequence[Row]) -> list[tuple[Verdict, Verdict]]:
    """Pairs of cases that have no leader in common: the decision is another one there. The first pair of each pair of
    leaders, by the order of the cases."""
    found: dict[frozenset[tuple[str, ...]], tuple[Verdict, Verdict]] = {}
    known = [verdict(row) for row in rows]
    for at, one in enumerate(known):
        for other in known[at + 1 :]:
            if not set(one.leaders) & set(other.leaders):
                found.setdefault(frozenset((one.leaders, other.leaders)), (one, other))
    return list(found.values())


def runs(own: Sequence[Verdict]) -> list[list[Verdict]]:
    """Neighbours in x with the same leaders."""
    return [list(group) for _, group in groupby(own, key=lambda one: one.leaders)]


def percent(value: float | None) -> str:
    """A gain as text."""
    if value is None:
        return "∞"
    if value >= 9.5:
        return f"{value + 1:.0f} times"
    return f"{value:+.0%}" if value >= 0.095 else f"{value:+.1%}"


def told(own: Sequence[Verdict], x: str) -> str:
    """A workload's winners in words: where, who, by how much over whom."""
    parts = []
    for group in runs(own):
        first, last = group[0], group[-1]
        where = f"{x} {first.x:g}" if first is last else f"{x} {first.x:g} to {last.x:g}"
        names = " and ".join(f"`{name}`" for name in first.leaders)
        who = f"**{names}**" if first.winner else f"tie of {names}"
        parts.append(f"{where}: {who}{_over(group)}")
    return "; ".join(parts)


def _over(group: Sequence[Verdict]) -> str:
    """By how much neighbours with the same leaders are better than the next best, and than the last."""
    if not group[0].next:
        return ""
    text = f", {_span([one.over_next for one in group])} over {_named(one.next for one in group)}"
    if any(one.last != one.next for one in group):
        text += f", {_span([one.over_last for one in group])} over {_named(one.last for one in group)}"
    return text


def _span(gains: Sequence[float | None]) -> str:
    ordered = sorted(gains, key=lambda gain: float("inf") if gain is None else gain)
    texts = [percent(gain) for gain in (ordered[0], ordered[-1])]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def _named(names: Iterable[str]) -> str:
    return " or ".join(f"`{name}`" for name in dict.fromkeys(names))
