"""The page of each experiment, and the one that compares them all. Whatever is a figure on them is read from the "
"data."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from sys import modules
from typing import Any

from _kit import SEEDS, Experiment, Shown
from _verdict import Row, Verdict, flips, mean, told, verdict, verdicts

from engine.core import Policy

BY = "Written by `python benchmarks/experiments/run.py`. What it was made from is kept in"
SIMULATED = (
    "Simulated, not measured: the engine's own schedulers, caches and loop run on a modelled device ([the "
    "lab](../lab.md)). "
    "A step takes what a roofline of the device says (70 % of its peak products, 80 % of its peak bandwidth, 0.5 ms of "
    "device time besides), and the host 1 ms between steps, where nothing else is said. The device is one H100 with "
    "Llama "
    "3 8B in bfloat16, where nothing else is said. Such a model compares decisions well and predicts milliseconds "
    "badly."
)


def write(chosen: Sequence[Experiment], every: Sequence[Experiment], docs: Path) -> None:
    """The pages and plots of the chosen ones; the comparison of all that have data."""
    from _plots import draw

    for one in chosen:
        kept = load(one, docs)
        if "simulated" in kept:
            draw(one, kept["simulated"]["rows"], docs / f"{one.name}.svg")
            (docs / f"{one.name}.md").write_text(page(one, kept), encoding="utf-8")
    (docs / "index.md").write_text(comparison(known(every, docs)), encoding="utf-8")


def known(every: Sequence[Experiment], docs: Path) -> list[tuple[Experiment, dict[str, Any]]]:
    """Those that have been simulated, and what is kept of them."""
    return [(one, kept) for one in every if "simulated" in (kept := load(one, docs))]


def load(one: Experiment, docs: Path) -> dict[str, Any]:
    """What is kept of it."""
    file = docs / "data" / f"{one.name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def page(one: Experiment, kept: dict[str, Any]) -> str:
    """All that is known of an experiment."""
    simulated = kept["simulated"]
    rows = simulated["rows"]
    parts = [
        f"# {one.title}\n\n{one.question}",
        *policies(one),
        f"What is known: {one.known}",
        SIMULATED,
        "## Goodput\n\n" + "\n".join(f"* **{name}** ({one.workloads[name]}). {told(own, one.x)}."
                                      for name, own in verdicts(rows).items()),
        flipped(one, rows),
        *([f"## What it says\n\n{one.reading}"] if one.reading else []),
        f"## Figures\n\n![{one.title}]({one.name}.svg)\n\nLines are means over seeds {listed(simulated['seeds'])}, "
        f"bands "
        "reach from the least to the greatest. In the tables, means, and for goodput the range over the seeds. "
        "Goodput: requests that were answered within every limit of the SLO, over the time in which requests come.",
        *(f"### {name.capitalize()}\n\n" + table(one, [row for row in rows if row["workload"] == name])
          for name in dict.fromkeys(row["workload"] for row in rows)),
        real(one, kept),
        f"{BY} `data/{one.name}.json`.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def policies(one: Experiment) -> list[str]:
    """Source of the policies that the experiment brings itself."""
    own = [value for value in vars(modules[one.name]).values() if inspect.isclass(value) and issubclass(value, Policy)
           and value is not Policy] if one.name in modules else []  # fmt: skip
    return [f"```python\n{inspect.getsource(value)}```" for value in own]


def table(one: Experiment, rows: Sequence[Row]) -> str:
    """A line for each side of each case."""
    shown = [cell for cell in one.shown if any(cell.figure in own for row in rows for own in row["sides"].values())]
    lines = [f"| {one.x} | {one.numbers or 'side'} | " + " | ".join(cell.label for cell in shown) + " |",
             "|---|---|" + "---|" * len(shown)]  # fmt: skip
    for row in rows:
        leaders = verdict(row).leaders
        for name, own in row["sides"].items():
            mark = f"**{name}**" if leaders == (name,) else name
            lines.append(f"| {row['x']:g} | {mark} | " + " | ".join(value(own, cell) for cell in shown) + " |")
    return "\n".join(lines)


def value(own: dict[str, list[float]], shown: Shown) -> str:
    """A figure: its mean, and of goodput its range."""
    found = [one * shown.times for one in own.get(shown.figure, ())]
    if not found:
        return ""
    text = format(mean(found), shown.format)
    if "e" in text:
        text = f"{mean(found):.0f}"
    if shown.figure == "goodput" and len(found) > 1:
        text += f" ({min(found):{shown.format}}–{max(found):{shown.format}})"
    return text


def flipped(one: Experiment, rows: Sequence[Row]) -> str:
    """Where another side wins, or over what that was looked for."""
    found = flips(rows)
    if found:
        return "It flips: " + "; ".join(f"{at(one, first)}, but {at(one, second)}" for first, second in found) + "."
    return (
        f"No flip: over {ranges(one, rows)}, no side that leads in one case is beaten in another by those that lead "
        f"there."
    )


def at(one: Experiment, found: Verdict) -> str:
    """A case and who leads there."""
    who = " and ".join(f"`{name}`" for name in found.leaders)
    return f"{who} lead{'s' if len(found.leaders) == 1 else ''} at {found.x:g} {one.x} of {found.workload}"


def ranges(one: Experiment, rows: Sequence[Row]) -> str:
    """What was swept."""
    return ", ".join(f"{name} ({own[0].x:g} to {own[-1].x:g} {one.x})" for name, own in verdicts(rows).items())


def real(one: Experiment, kept: dict[str, Any]) -> str:
    """What the default model said."""
    head = "## On the real model, small\n\n"
    if "real" not in kept:
        return head + "Not run yet: `python benchmarks/experiments/run.py --real`."
    found = kept["real"]
    (case,) = one.real
    text = (
        f"{found['model']} on {found['device']}: {one.workloads['real']}; {found['requests']} requests a run, seeds "
        f"{listed(found['seeds'])}, SLO {slo_text(case.slo)}. Measured in process, in an open loop. So few requests "
        f"on a "
        "machine that drifts say whether the mechanism is there, not by how much it pays."
    )
    parts = [text, table(one, found["rows"]), f"Goodput: {told(verdicts(found['rows'])['real'], one.x)}."]
    if one.real_reading:
        parts.append(one.real_reading)
    return head + "\n\n".join(parts)


def slo_text(slo: Any) -> str:
    """An SLO, or those of tenants."""
    return ", ".join(f"{name}: {one}" for name, one in slo.items()) if isinstance(slo, dict) else str(slo)


def listed(values: Sequence[int]) -> str:
    """1, 2, 3."""
    return ", ".join(map(str, values))


HOW = """\
## How to run them

```sh
python -m pip install 'sixhooks[report]'
python benchmarks/experiments/run.py             # simulated: minutes of one core
python benchmarks/experiments/run.py --real      # the default model, on a machine that does nothing else
python benchmarks/experiments/run.py --page-only # pages and plots from what is kept
```

An experiment is a module of `benchmarks/experiments/`: its sides, its cases, its SLO. Static batching is a policy of \
ten lines there. Figures of CPU time (planning) are of the machine that wrote these pages."""


def comparison(found: Sequence[tuple[Experiment, dict[str, Any]]]) -> str:
    """The page of all."""
    lines = [
        "# Experiments: one decision changed, all else equal",
        "What the field says of scheduling and caching, tried with one engine: the same arrivals, the same model, the "
        "same device; one decision is another. Who wins is said by goodput: requests a second that were answered "
        "within every limit of an SLO, over the time in which requests come. " + SIMULATED,
        f"Every case was run with {len(SEEDS)} seeds. A side is beaten where another has at least 1 % more in the "
        "mean, and at no seed more than 0.5 % less; who is not beaten leads, and who leads alone is the winner. Gains "
        "are of means: over the best of those that are beaten, and over the last of them. A flip: two cases that have "
        "no leader in common.",
        "| experiment | workload, SLO | winner by goodput, by how much |\n|---|---|---|\n" + "\n".join(
            row for one, kept in found for row in rows_of(one, kept["simulated"]["rows"])),
        "## Where it flips\n\n" + "\n".join(
            f"* [{one.title}]({one.name}.md). {flipped(one, kept['simulated']['rows'])}" for one, kept in found),
        "## On the real model\n\nThe same decisions on the default model on a CPU, a few dozen requests each: "
        "whether the mechanism is there.\n\n" + real_table(found),
        HOW,
        "```{toctree}\n:hidden:\n\n" + "\n".join(one.name for one, _ in found) + "\n```",
    ]  # fmt: skip
    return "\n\n".join(lines) + "\n"


def rows_of(one: Experiment, rows: Sequence[Row]) -> list[str]:
    """A line of the comparison for each workload."""
    return [
        f"| [{one.title}]({one.name}.md) | {name}: {one.workloads[name]} | {told(own, one.x)} |"
        for name, own in verdicts(rows).items()
    ]


def real_table(found: Sequence[tuple[Experiment, dict[str, Any]]]) -> str:
    """Goodput of each side, measured."""
    lines = ["| experiment | goodput, req/s | verdict |", "|---|---|---|"]
    for one, kept in found:
        if "real" not in kept:
            continue
        for row in kept["real"]["rows"]:
            cells = ", ".join(f"{name} {mean(own['goodput']):.2f}" for name, own in row["sides"].items())
            lines.append(f"| [{one.title}]({one.name}.md) | {cells} | {told([verdict(row)], one.x)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."
