"""Plots of an experiment, as SVG that is the same whenever it is made from the same figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from _kit import Experiment, Shown
from _verdict import Row, mean

mpl.use("svg")
mpl.rcParams.update({
    "svg.hashsalt": "sixhooks", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False, "lines.markersize": 4,
})  # fmt: skip
MARKS = "osD^v"

Line = tuple[list[float], list[Sequence[float]]]
"""Places, and the values of all seeds at each."""


def draw(one: Experiment, rows: Sequence[Row], path: Path) -> None:
    """A column for each workload, a row for each panel. Lines are means; bands reach over all seeds."""
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    high, wide = len(one.panels), len(workloads)
    figure = Figure(figsize=(0.6 + 3.1 * wide, 0.5 + 2.2 * high), layout="constrained")
    axes = figure.subplots(high, wide, squeeze=False)
    for column, name in enumerate(workloads):
        own = [row for row in rows if row["workload"] == name]
        for place, shown in enumerate(one.panels):
            _panel(axes[place][column], one, own, shown)
            if not column:
                axes[place][column].set_ylabel(shown.label)
        axes[0][column].set_title(name, fontsize=9)
        axes[high - 1][column].set_xlabel(one.numbers or one.x)
    handles, labels = axes[0][0].get_legend_handles_labels()
    if one.numbers:
        for column in range(wide):
            axes[0][column].legend(fontsize=7)
    else:
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def _panel(axis: Any, one: Experiment, rows: Sequence[Row], shown: Shown) -> None:
    for number, (name, (xs, values)) in enumerate(_lines(one, rows, shown).items()):
        color = f"C{number}"
        axis.plot(xs, [mean(own) for own in values], marker=MARKS[number % len(MARKS)], color=color, label=name)
        axis.fill_between(xs, [min(own) for own in values], [max(own) for own in values], color=color, alpha=0.2, lw=0)
    if one.numbers:
        axis.set_xscale("log")
        places = [side.value for side in one.sides]
        axis.set_xticks(places, [side.name for side in one.sides])
        axis.minorticks_off()
    axis.set_ylim(bottom=0)


def _lines(one: Experiment, rows: Sequence[Row], shown: Shown) -> Mapping[str, Line]:
    """A line for each side; where sides are numbers, for each case, over the sides."""
    found: dict[str, Line] = {}
    for row in rows:
        for side in one.sides:
            values = row["sides"].get(side.name, {}).get(shown.figure)
            if values is None:
                continue
            by_number = one.numbers and side.value is not None
            key = f"{row['x']:g} {one.x}" if by_number else side.name
            xs, lines = found.setdefault(key, ([], []))
            xs.append(side.value if by_number else row["x"])
            lines.append([value * shown.times for value in values])
    return found
