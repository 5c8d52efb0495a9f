"""Cells of a matrix: each combination once a round, in turns; what is finished is kept and not run again."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import ConfigError
from engine.lab.matrix import Combination

SETTINGS = "settings.json"
FIGURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("goodput", ("slo", "goodput")),
    ("kept_share", ("slo", "share")),
    ("requests_per_second", ("requests_per_second",)),
    ("output_tokens_per_second", ("output_tokens_per_second",)),
    *((f"{name}_{which}", (name, which)) for name in ("queue", "ttft", "tpot", "itl", "e2e") for which in
      ("mean", "p50", "p90", "p99")),
    ("cached_share", ("cached_share",)),
    ("preemptions", ("preemptions",)),
    ("recomputed_tokens", ("recomputed_tokens",)),
)  # fmt: skip
"""What of a summary stands in a line of a table, by name, and where it is found."""


class Cell(NamedTuple):
    """One run of a matrix."""

    number: int
    combination: Combination
    round: int

    @property
    def name(self) -> str:
        """Of its file."""
        words = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(self.combination.choice.values())).strip("-")[:60]
        return f"cell-{self.number:03d}-round-{self.round}" + (f"-{words}" if words else "")


def in_turns(combinations: Sequence[Combination], rounds: int) -> Iterator[Cell]:
    """Every combination once a round; each round begins with another, so that none is always first, and has a seed of
    its own, the same for all."""
    for turn in range(rounds):
        order = [*range(len(combinations))]
        start = turn % len(order)
        for number in order[start:] + order[:start]:
            one = combinations[number]
            job = one.job.model_copy(update={"seed": one.job.seed + turn})
            yield Cell(number, one._replace(job=job), turn + 1)


class Kept:
    """A folder of finished cells, one JSON each, of one command.

    Args:
        settings: all that shapes what is measured. Values are plain.

    Raises:
        ConfigError: other settings were measured there, or the folder cannot be used.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        plain = json.loads(json.dumps(settings))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (file := folder / SETTINGS).exists():
                before = json.loads(file.read_text(encoding="utf-8"))
                if differing := sorted(set(_differing(before, plain))):
                    raise ConfigError(f"{folder} has results of other settings ({', '.join(differing)}): take another")
            elif any(folder.glob("cell-*.json")):
                raise ConfigError(f"{folder} has cells, and no {SETTINGS} that says what of")
            else:
                write(file, plain)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} cannot be used: {error}") from error

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """What came of a cell; ``None``: it is not finished, or it died. Raises ``ConfigError``."""
        file = self.folder / f"{cell.name}.json"
        try:
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error
        return None if found.get("died") else found

    def keep(self, cell: Cell, data: Mapping[str, Any]) -> None:
        """Write it. Whoever is stopped meanwhile leaves the folder as it was."""
        write(self.folder / f"{cell.name}.json", data)


def write(file: Path, data: Any) -> None:
    """JSON into a file, whole or not at all."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, file)


def _differing(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Where two plain values differ; places in lists are not told."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {*a, *b}:
            yield from _differing(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for one, other in zip(a, b, strict=True):
            yield from _differing(one, other, path)
    elif a != b:
        yield path


def measured_of(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What was measured in a finished cell; of a search, at the rate that it found. ``None``: nothing."""
    found = data.get("found")
    measured: Mapping[str, Any] | None = data.get("measured") if found is None else found["best"]
    return measured


def line_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """A finished cell as one line of a table: its choice, its round, its figures; of a search, its rate and the figures
    at that rate."""
    found, measured = data.get("found"), measured_of(data)
    summary = {} if measured is None else measured["summary"]
    line = {**data["choice"], "round": data["round"], "died": data.get("died") or ""}
    if found is not None:
        line["rate"] = found["rate"]
    for name, path in FIGURES:
        value: Any = summary
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        without = path[0] == "slo" and not summary.get("slo", {}).get("limits")  # nothing to keep to
        line[name] = None if without else value
    return line


class Together(NamedTuple):
    """A combination over its rounds: medians of figures, the least and greatest of one, and cells that died."""

    choice: Mapping[str, str]
    rounds: int
    died: Sequence[str]
    median: dict[str, float | None]
    least: dict[str, float | None]
    most: dict[str, float | None]


def over_rounds(cells: Sequence[Mapping[str, Any]]) -> list[Together]:
    """Every combination once, in the order in which it is first met."""
    by_choice: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for data in cells:
        by_choice.setdefault(tuple(data["choice"].items()), []).append(data)
    found = []
    for key, own in by_choice.items():
        lines = [line_of(data) for data in own if not data.get("died")]
        names = ("rate", *(name for name, _ in FIGURES))
        values = {n: [line[n] for line in lines if isinstance(line.get(n), int | float)] for n in names}
        choice = dict(key)
        found.append(
            Together(
                choice, len(lines), [str(data["died"]) for data in own if data.get("died")],
                *({n: how(v) if v else None for n, v in values.items() if n not in choice}
                  for how in (statistics.median, min, max)),
            )
        )  # fmt: skip
    return found
